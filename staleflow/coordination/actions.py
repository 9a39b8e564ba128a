"""What `Control` asks the outside to do, in the order in which it is to be done.

Those of which there is one for each trajectory are named tuples, which are quicker to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.commands import Command
from staleflow.protocol.records import Record


class Append(NamedTuple):
    """Append a record to the ledger. Before a Train that follows, the ledger is flushed."""

    seq: int
    attempt: int
    record: Record


class Send(NamedTuple):
    """Send a command to its instance."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawGroups:
    """Create this many groups from the prompt source and answer with GroupsDrawn."""

    count: int
    padding: bool = False
    """Draw beyond the last epoch, to fill the last batch (`data.last_batch: pad`)."""


class Score(NamedTuple):
    """Ask the environment whether the trajectory is over and, if so, have it scored."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The trajectory failed too often: mark its payload failed. It is masked, never scored zero."""

    trajectory_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resample:
    """A straggler was aborted: drop its payload, and create another trajectory of its prompt in its place."""

    trajectory_id: str
    new_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """A straggler is complete as it is, as if its token budget were used up (finish reason LENGTH)."""

    trajectory_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Hand these groups to the trainer."""

    step: int
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """(group id, its kept trajectory ids), in order of consumption."""
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Drop the payload of released trajectories."""

    trajectory_ids: tuple[str, ...]
    reason: str
    """filtered, aborted, failed, expired or discarded: the column of the token balance. One Discard holds all
    of an expired group, whose prompt is unused and must be drawn again before any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over."""

    reason: str
    """completed, exhausted, interrupted or filtered_out."""


Action = Append | Send | DrawGroups | Score | GiveUp | Resample | Truncate | Train | Discard | Finish
