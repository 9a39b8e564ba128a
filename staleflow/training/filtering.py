"""Which members are usable, and which groups give no signal. No torch: the control side imports this.

Invariants:

- only the raw verifier reward decides, never a shaped one, so that a group of answers that are all wrong is
  filtered whatever their lengths (F27);
- a member without a finite reward, or marked unusable, is excluded from the filter, from the group's mean
  and deviation, and from the loss (F25, F26).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from staleflow.data.responses import Scored
from staleflow.data.trajectory import FinishReason, Reward

EQUAL_REWARDS = 1e-6
"""Raw rewards closer than this count as equal: it absorbs rounding in averaged scores and is far below the
smallest difference that a verifier intends."""


def is_usable_reward(reward: Reward) -> bool:
    """Whether a reward may enter the group statistics: marked usable and finite."""
    return reward.usable and math.isfinite(reward.raw)


def is_usable(scored: Scored) -> bool:
    """Whether a member is trained on: a usable reward and a response that did not fail."""
    return is_usable_reward(scored.reward) and scored.trajectory.finish_reason is not FinishReason.FAILED


def is_uninformative(raw_rewards: Iterable[float]) -> bool:
    """Whether a group gives no signal: fewer than two usable members, or all raw rewards equal.

    `raw_rewards` are those of the usable members; values that are not finite count as unusable.
    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) drops such groups.
    """
    usable = [raw for raw in raw_rewards if math.isfinite(raw)]
    return len(usable) < 2 or max(usable) - min(usable) <= EQUAL_REWARDS
