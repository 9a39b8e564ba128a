"""Group advantages and reward shaping.

Invariants:

- a group's mean and deviation come from the raw rewards of its usable members, before any masking and
  before any shaping; shaping moves only the member it belongs to;
- every advantage is finite; it is zero for unusable members, and for all members of a group that gives
  no signal (F26).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from staleflow.data.trajectory import FloatArray, ScoredTrajectory
from staleflow.training.filtering import is_uninformative, is_usable


def normalised_advantages(
    group: Sequence[ScoredTrajectory], penalties: FloatArray | None = None
) -> FloatArray:
    """`(raw + penalty - mean(raw)) / std(raw)` per member; shape (members,).

    Mean and population deviation are over the raw rewards of usable members. `penalties`, shape
    (members,), are at most 0; None means no shaping.

    GRPO (arXiv 2402.03300, section 4.1) with DAPO's reward shaping.
    """
    usable = np.array([is_usable(member) for member in group], dtype=np.bool_)
    raw = np.array([member.reward.raw for member in group], dtype=np.float64)
    if is_uninformative(raw[usable].tolist()):
        return np.zeros(len(group), dtype=np.float32)
    mean, deviation = raw[usable].mean(), raw[usable].std()
    shaped = raw if penalties is None else raw + penalties
    return np.where(usable, (shaped - mean) / deviation, 0.0).astype(np.float32)


def overlong_penalties(
    group: Sequence[ScoredTrajectory], *, max_new_tokens: int, buffer: int, penalty: float
) -> FloatArray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), each in [-penalty, 0].

    A response pays nothing up to `max_new_tokens - buffer` tokens, and from there on linearly up to
    `penalty` at `max_new_tokens`. `buffer` = 0 turns it off. Shape (members,).
    """
    if buffer <= 0:
        return np.zeros(len(group), dtype=np.float32)
    lengths = np.array([member.trajectory.response_len for member in group], dtype=np.float64)
    excess = np.clip((lengths - (max_new_tokens - buffer)) / buffer, 0.0, 1.0)
    return (-penalty * excess).astype(np.float32)
