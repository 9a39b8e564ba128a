"""What the config knows about each algorithm without loading it: its requirements and its defaults.

An algorithm's defaults are a layer above configs/default.yaml and below everything that the user sets, so the
resolved config shows them. They are the values of its paper, where the paper gives any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One algorithm as the config sees it."""

    compares: bool = True
    """Whether it compares the members of a group. Groups then need at least two."""
    critic: bool = False
    """Whether it has a critic."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for keys of the section `training`, sections as maps."""


_SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}

ALGORITHMS: Mapping[str, Traits] = {
    "grpo": Traits(
        # beta 0.04: DeepSeekMath, section 4.2.
        defaults={
            **_SYMMETRIC,
            "dynamic_sampling": False,
            "kl": {"coefficient": 0.04, "estimator": "k3", "place": "loss"},
        }
    ),
    "dr_grpo": Traits(defaults={**_SYMMETRIC, "dynamic_sampling": False}),
    "dapo": Traits(defaults={"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True}),
    "rloo": Traits(defaults={**_SYMMETRIC, "dynamic_sampling": False}),
    # The form of the KL is the paper's, the coefficient ours: it depends on the task.
    "reinforce_pp": Traits(
        compares=False,
        defaults={
            **_SYMMETRIC,
            "dynamic_sampling": False,
            "kl": {"coefficient": 0.001, "estimator": "k1", "place": "reward"},
        },
    ),
    "reinforce_pp_baseline": Traits(
        defaults={
            **_SYMMETRIC,
            "dynamic_sampling": False,
            "kl": {"coefficient": 0.001, "estimator": "k2", "place": "loss"},
        }
    ),
    "ppo": Traits(compares=False, critic=True, defaults={**_SYMMETRIC, "dynamic_sampling": False}),
    "gspo": Traits(defaults={"clip_low": 3e-4, "clip_high": 4e-4, "dynamic_sampling": False}),
    # No lower bound, as in MiniMax-M1, which gives no number for the upper one: weights up to 5, ours.
    "cispo": Traits(defaults={"clip_low": 1.0, "clip_high": 4.0, "dynamic_sampling": True}),
}


def traits(name: str) -> Traits:
    """The traits of a known algorithm; for a user's own one, those with the fewest requirements."""
    return ALGORITHMS.get(name, Traits(compares=False))
