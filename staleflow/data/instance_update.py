"""What a rollout instance sends: its report, and the tokens that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.events import InstanceReport
from staleflow.data.trajectory import FinishReason, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Tokens of one trajectory that its owner has not seen yet."""

    trajectory_id: str
    segment: Segment
    """May be empty."""
    finish_reason: FinishReason | None = None


class InstanceUpdate(NamedTuple):
    """A report, and the payload that belongs to it."""

    report: InstanceReport
    deltas: tuple[Delta, ...]
    """In the order to apply them; those of aborted trajectories too, so that no token goes uncounted."""
