"""The config: one typed schema, layers of values, and errors that say what was meant.

Nothing here imports torch or Ray, so that a mistake is reported within a second.
"""

from staleflow.config.load import load_config
from staleflow.config.schema import Config

__all__ = ["Config", "load_config"]
