"""What asks environments between two turns of the model."""

from __future__ import annotations

from staleflow.config.schema import Config
from staleflow.data.environment import SINGLE_TURN, Environment, load_environment
from staleflow.data.environment_pool import EnvironmentPool, InlineEnvironments
from staleflow.runtime.backend import Environments


def has_turns(config: Config) -> bool:
    """Whether an environment may answer the model."""
    return config.environment.name != SINGLE_TURN


def build_environment(config: Config) -> Environment | None:
    """The config's environment; None: every turn is the last. Raises ConfigError."""
    return load_environment(config.environment.name, config.environment.options)


def build_environments(config: Config) -> Environments | None:
    """The pool that asks the config's environment, in this process."""
    environment, section = build_environment(config), config.environment
    if environment is None:
        return None
    return EnvironmentPool(environment, workers=section.workers, timeout_s=section.timeout_s)


def build_inline_environments(config: Config, environment: Environment | None) -> Environments | None:
    """The same in one thread. `environment` replaces the config's."""
    environment = environment or build_environment(config)
    return None if environment is None else InlineEnvironments(environment)
