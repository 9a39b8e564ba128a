"""What `Control` orders: commands to rollout instances, and actions for its caller.

Commands (Route, Interrupt, Abort, Pull) to one incarnation of an instance carry consecutive sequence numbers
from 1 on and are applied in that order. A new incarnation voids every unacknowledged command to the old one.
The caller performs actions in the order in which it gets them.

Types created for every trajectory are named tuples: cheaper to create than frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from staleflow.protocol.records import Record

# ---------------------------------------------------------------------- commands to an instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a Route requires of the staleness buffer before it is sent."""

    kind: Literal["reserve", "lower"]
    version: int
    """V of the new reservation, or the V to which the group's reservation is lowered."""
    spare: bool = False
    """Reserve as a spare (redundant) group."""


class Route(NamedTuple):
    """Start or continue a trajectory on an instance."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    group_id: str
    min_version: int
    """The instance refuses the trajectory when its loaded version is lower (V_group of the reservation)."""
    admission: Admission | None = None
    """None: the group's reservation already admits the instance's version."""
    length: int = 0
    """Prompt and response tokens so far: what the instance must prefill."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Stop a trajectory and return it to the trajectory server with its tokens."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    length: int = 0
    """Its last known length: tokens that leave the KV cache. 0 if it waits in the instance's own queue."""
    target: str = ""
    """The instance on which migration expects it to continue; room is kept there until it is back."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a trajectory and drop its tokens."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    length: int = 0
    """Its last known length: tokens that leave the KV cache. 0 if it waits in the instance's own queue."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Load the newest weights from the parameter server."""

    instance: str
    incarnation: int
    seq: int
    version: int
    """The newest version when ordered. The instance loads the newest available one, at least this one."""
    reason: str = ""


Command = Route | Interrupt | Abort | Pull


def renumbered(command: Command, seq: int) -> Command:
    """The same command with another sequence number."""
    return command._replace(seq=seq) if isinstance(command, Route) else replace(command, seq=seq)


# ---------------------------------------------------------------------- actions of the caller


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
    """Ask the environment whether the trajectory is over and, if so, score it."""

    trajectory_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The trajectory failed too often: mark its payload as failed. It is masked, never scored zero."""

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
    """Treat a straggler as complete, as if its token budget were used up (finish reason LENGTH)."""

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
    trajectories of an expired group. Its prompt is unused and must be drawn again before any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over."""

    reason: str
    """completed, exhausted, interrupted or filtered_out."""


Action = Append | Send | DrawGroups | Score | GiveUp | Resample | Truncate | Train | Discard | Finish


class Outbox:
    """Actions decided and not yet returned to the caller, in order.

    The only place that numbers ledger records: consecutively, from `next_seq` on.
    """

    def __init__(self, *, attempt: int, next_seq: int) -> None:
        self._attempt = attempt
        self._next_seq = next_seq
        self._actions: list[Action] = []

    def record(self, record: Record) -> None:
        """Add an Append of the record under the next sequence number."""
        self._actions.append(Append(self._next_seq, self._attempt, record))
        self._next_seq += 1

    def put(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def take(self) -> list[Action]:
        """All actions since the last call."""
        actions, self._actions = self._actions, []
        return actions
