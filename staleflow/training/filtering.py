"""Which members count, and which groups teach nothing. No torch: the control side imports this.

Invariants:

- only the raw verifier reward decides; a shaped reward never does, so that a group of answers that are
  all wrong is filtered whatever their lengths (F27);
- a member without a finite reward, or one marked unusable, counts nowhere: not in the filter, not in
  the group's mean and deviation, not in the loss (F25, F26).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from staleflow.data.responses import Scored
from staleflow.data.trajectory import FinishReason, Reward

EQUAL_REWARDS = 1e-6
"""Raw rewards closer than this are equal: it absorbs rounding in averaged scores, and lies far below the
smallest difference that a verifier means."""


def is_usable_reward(reward: Reward) -> bool:
    """Whether a reward may enter the group statistics: marked usable, and a finite number."""
    return reward.usable and math.isfinite(reward.raw)


def is_usable(scored: Scored) -> bool:
    """Whether a member is trained on: a usable reward, and a response that was really generated."""
    return is_usable_reward(scored.reward) and scored.trajectory.finish_reason is not FinishReason.FAILED


def is_uninformative(raw_rewards: Iterable[float]) -> bool:
    """Whether a group gives no signal: fewer than two usable members, or all raw rewards equal.

    `raw_rewards` are those of the usable members; values that are not finite are taken as unusable.
    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) drops such groups.
    """
    usable = [raw for raw in raw_rewards if math.isfinite(raw)]
    return len(usable) < 2 or max(usable) - min(usable) <= EQUAL_REWARDS
