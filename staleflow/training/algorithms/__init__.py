"""The algorithms by name. A dotted path (`my_package.my_module.MY_ALGORITHM`) names your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from staleflow.errors import ConfigError
from staleflow.registry import load_named

if TYPE_CHECKING:
    from staleflow.training.algorithms.algorithm import Algorithm

ALGORITHMS: Mapping[str, str] = {
    "grpo": "staleflow.training.algorithms.grpo.GRPO",
    "dr_grpo": "staleflow.training.algorithms.dr_grpo.DR_GRPO",
    "dapo": "staleflow.training.algorithms.dapo.DAPO",
    "rloo": "staleflow.training.algorithms.rloo.RLOO",
    "reinforce_pp": "staleflow.training.algorithms.reinforce_pp.REINFORCE_PP",
    "reinforce_pp_baseline": "staleflow.training.algorithms.reinforce_pp_baseline.REINFORCE_PP_BASELINE",
    "ppo": "staleflow.training.algorithms.ppo.PPO",
    "gspo": "staleflow.training.algorithms.gspo.GSPO",
    "cispo": "staleflow.training.algorithms.cispo.CISPO",
}


def load_algorithm(name: str) -> Algorithm:
    """The algorithm with this name or dotted path. Imports torch. Raises ConfigError."""
    from staleflow.training.algorithms.algorithm import Algorithm

    found = load_named("training algorithm", name, ALGORITHMS)
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"training algorithm {name!r} is a {type(found).__name__}, but must be an Algorithm"
        )
    return found
