"""What an estimator of advantages sees of a training batch, and what it gives back.

No torch. Arrays run over a trajectory's generated tokens, in order; given tokens (tool output, next turn) are
left out, so that the token after a turn's last is the next turn's first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staleflow.data.trajectory import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """One member of a group, with T generated tokens."""

    raw: float
    """The verifier's own score. It alone decides whether a group teaches anything (F27)."""
    shaping: float
    """Added to the score of this member, and to no statistic of its group; at most 0 (overlong penalty)."""
    usable: bool
    """False: it counts in no statistic, has no token in the loss, and T is 0."""
    token_rewards: FloatArray
    """Reward of each token beside the score: minus the KL penalty, where it is in the reward; shape (T,)."""
    values: FloatArray | None
    """What the critic expected before each token, shape (T,); None without a critic."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is learnt from one member; both of shape (T,), and finite."""

    advantages: FloatArray
    returns: FloatArray | None = None
    """What the critic should have expected; None without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discount:
    """How far a reward reaches back; read by estimators with a critic."""

    gamma: float = 1.0
    """Weight of the next token's value."""
    gae_lambda: float = 1.0
    """Weight of the next token's advantage: 0 trusts the critic alone, 1 the rewards alone."""


Group = Sequence[MemberOutcome]
Estimator = Callable[[Sequence[Group], Discount], list[list[Estimate]]]
"""The groups of a training batch -> an estimate for each member, in the same order."""
