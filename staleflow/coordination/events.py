"""What the outside tells `Control`. Each event is a fact that has already happened.

Those of which there is one for each trajectory are named tuples, which are quicker to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.reports import InstanceReport
from staleflow.protocol.records import Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance is up with weights loaded; an earlier incarnation of it is gone."""

    instance: str
    incarnation: int
    version: int
    kv_capacity: int
    """Tokens."""
    max_running: int
    """Most trajectories it decodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost:
    """An instance died or stopped answering."""

    instance: str
    incarnation: int
    lengths: tuple[tuple[str, int], ...] = ()
    """Length of each of its trajectories as the trajectory server has it: the tokens that were reported."""
    reason: str = ""


class Reported(NamedTuple):
    """An instance sent its report."""

    report: InstanceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """A group as the trajectory server created it."""

    group_id: str
    members: tuple[str, ...]
    """Trajectory ids; more than the group size when members are redundant."""
    prompt_length: int
    """Tokens."""
    redrawn: bool = False
    """The prompt was in an expired spare group before; this one is not swapped out again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsDrawn:
    """The answer to DrawGroups. Fewer than asked for means nothing by itself; SourceExhausted does."""

    groups: tuple[DrawnGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExhausted:
    """The prompt source has no further prompt in the epochs it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingExternal:
    """The environment of a generated trajectory will answer later."""

    trajectory_id: str
    limit_s: float
    """Seconds after which the trajectory counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The environment added tokens: the trajectory goes on at this length."""

    trajectory_id: str
    length: int
    """Prompt and response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The environment of a waiting trajectory has nothing to add: it is being scored."""

    trajectory_id: str


class Rewarded(NamedTuple):
    """A trajectory was scored."""

    trajectory_id: str
    raw: float
    """The verifier's own score."""
    usable: bool
    """False: masked out of loss, statistics and filter."""
    token_hash: str
    """Of the response ids; the ledger's proof that what was sampled is what is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The trainer finished an update and says what it trained on."""

    record: Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFree:
    """The trainer has the weights of `version` and takes the next batch, though their push is not over.

    Nobody has to say so: Pushed implies it.
    """

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A weight version is complete in the parameter server."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Finish the step that is being trained, then end."""


Event = (
    InstanceJoined
    | InstanceLost
    | Reported
    | GroupsDrawn
    | SourceExhausted
    | WaitingExternal
    | Given
    | Ended
    | Rewarded
    | TrainedStep
    | TrainerFree
    | Pushed
    | StopRequested
)
