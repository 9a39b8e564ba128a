"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, soft overlong punishment.

Dynamic sampling happens before a group reaches the trainer: `training.filtering.is_uninformative`.
"""

from __future__ import annotations

from collections.abc import Sequence

from staleflow.data.trajectory import FloatArray, ScoredTrajectory
from staleflow.training.advantages import normalised_advantages, overlong_penalties
from staleflow.training.algorithms.algorithm import Algorithm, Shaping
from staleflow.training.losses import clip_higher, per_token_scale


def advantages(group: Sequence[ScoredTrajectory], shaping: Shaping) -> FloatArray:
    """Raw reward plus overlong penalty, centred and scaled by the group's raw rewards; shape (members,)."""
    penalties = overlong_penalties(
        group,
        max_new_tokens=shaping.max_new_tokens,
        buffer=shaping.overlong_buffer,
        penalty=shaping.overlong_penalty,
    )
    return normalised_advantages(group, penalties)


DAPO = Algorithm(
    name="dapo",
    advantages=advantages,
    token_loss=clip_higher,
    token_scale=per_token_scale,
    defaults={"clip_low": 0.2, "clip_high": 0.28, "dynamic_sampling": True},
)
