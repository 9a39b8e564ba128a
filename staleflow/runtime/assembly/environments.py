"""What asks environments between two turns of the model."""

from __future__ import annotations

from staleflow.config.schema import Config
from staleflow.data.environment import Environment
from staleflow.runtime.backend import Environments


def has_turns(config: Config) -> bool:
    """Whether the config's environment may answer the model."""
    return False


def build_environments(config: Config) -> Environments | None:
    """The pool that asks the config's environment; None where every turn is the last."""
    return None


def build_inline_environments(config: Config, environment: Environment | None) -> Environments | None:
    """The same in this process. `environment` replaces the config's."""
    return None
