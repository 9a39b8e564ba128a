"""Input and output of an advantage estimator.

No torch. Arrays cover a trajectory's generated tokens, in order, without given tokens (tool output, next
turn): the last token of a turn is followed by the first of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staleflow.data.trajectory import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """One member of a group, with T generated tokens."""

    raw: float
    """The verifier's own score. It alone decides whether a group gives a signal (F27)."""
    shaping: float
    """Added to this member's score but excluded from group statistics; at most 0 (overlong penalty)."""
    usable: bool
    """False: excluded from all statistics and from the loss, and T is 0."""
    token_rewards: FloatArray
    """Reward of each token in addition to the score, shape (T,): minus the KL penalty if it is in the
    reward."""
    values: FloatArray | None
    """The critic's value before each token, shape (T,); None without a critic."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Advantages and critic targets of one member; both finite and of shape (T,)."""

    advantages: FloatArray
    returns: FloatArray | None = None
    """The critic's targets; None without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discount:
    """How far rewards propagate back; used by estimators with a critic."""

    gamma: float = 1.0
    """Weight of the next token's value."""
    gae_lambda: float = 1.0
    """Weight of the next token's advantage: 0 uses the critic alone, 1 the rewards alone."""


Group = Sequence[MemberOutcome]
Estimator = Callable[[Sequence[Group], Discount], list[list[Estimate]]]
"""The groups of a training batch -> an estimate for each member, in the same order."""
