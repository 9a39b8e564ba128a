"""Messages of a rollout instance: its report with the new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.events import InstanceReport
from staleflow.data.trajectory import FinishReason, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one trajectory, not yet reported to its owner."""

    trajectory_id: str
    segment: Segment
    """May be empty."""
    finish_reason: FinishReason | None = None


class InstanceUpdate(NamedTuple):
    """A report and its payload."""

    report: InstanceReport
    deltas: tuple[Delta, ...]
    """In the order to apply them. Includes aborted trajectories, so that every token is counted."""
