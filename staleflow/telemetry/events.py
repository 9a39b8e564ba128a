"""What happened in a run, told once by the run loop, as it happens.

Invariants: every event is a fact, told after the loop has acted on it; listening changes nothing. Facts that
are messages of a backend or events of `Control` are told as those same objects.

Journal, metrics, status and statistics are listeners. Events of which there is one for each trajectory are
named tuples, which are quicker to make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, Protocol

from staleflow.coordination.actions import Command
from staleflow.coordination.events import (
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    TurnGiven,
    WaitingExternal,
)
from staleflow.coordination.view import ControlView
from staleflow.data.responses import Balance, LateTokens, Response, Scored
from staleflow.data.trajectory import Reward
from staleflow.protocol.records import TrainedMember

# ---------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """The loop begins. Listeners look at `view` and `balance` later."""

    view: ControlView
    balance: Balance


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegan:
    """The run is `starting`, `running`, `finishing step`, `saving` or `evaluating`."""

    phase: str


class RecordAppended(NamedTuple):
    """A record is in the ledger."""

    seq: int


class ControlRan(NamedTuple):
    """`Control` computed: in its cycle, or handling an event."""

    cpu_s: float
    in_cycle: bool


class TurnEnded(NamedTuple):
    """The loop has decided, or waited in vain: a moment to look at the state of the run."""

    cycled: bool
    """A coordination cycle was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """`Control` ended the run: completed, exhausted, interrupted or filtered_out."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Nothing is under way any more, in an attempt that did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopClosed:
    """The loop is over, however it ended: the last event. Listeners close their files."""


# ---------------------------------------------------------------------- instances


class CommandSent(NamedTuple):
    """A command goes to its instance."""

    command: Command


class ReportReceived(NamedTuple):
    """A report came in, and its tokens are in the trajectory server."""

    report: InstanceReport
    late: Sequence[LateTokens]
    find: Callable[[str], Response | None]
    """The trajectories that the report names; None for those dropped meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDown:
    """An instance died, failed or stopped answering. If it is started again, an InstanceJoined follows."""

    instance: str
    incarnation: int
    reason: str


# ---------------------------------------------------------------------- trajectories


class LeftForEnvironment(NamedTuple):
    """Environments are asked what follows a turn. BackFromEnvironment comes for each trajectory."""

    trajectory_ids: Sequence[str]


class BackFromEnvironment(NamedTuple):
    """An environment has answered, or failed to. After Waiting it is asked again, and this event repeats."""

    trajectory_id: str


class GenerationEnded(NamedTuple):
    """A trajectory is complete, or given up."""

    trajectory: Response


class RewardReceived(NamedTuple):
    """A reward came in."""

    trajectory_id: str
    reward: Reward
    dropped: bool
    """The trajectory was dropped meanwhile."""


class Released(NamedTuple):
    """Trajectories were dropped: a group, redundant members, or all there is at the end."""

    trajectories: Sequence[Response]
    """As they were."""
    reason: str
    """filtered, aborted, failed, expired or discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A trajectory failed too often: it is masked."""

    trajectory_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerResampled:
    """A straggler was dropped for another trajectory of its prompt."""

    dropped: Response
    new_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerTruncated:
    """A straggler is complete as it is."""

    trajectory: Response
    reason: str


# ---------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """A batch went to the trainer, which had been idle for `waited_s`."""

    step: int
    groups: Sequence[Sequence[Scored]]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The trainer finished a step and takes the next batch. WeightsPushed follows."""

    step: int
    """The version at its start; at its end it is one more."""
    trained: tuple[TrainedMember, ...]
    """As the trainer read it off its own tensors."""
    metrics: Mapping[str, float]
    """`train/...` names of DESIGN section 6."""
    update_s: float
    """Without what it waited for the push before it."""
    waited_s: float = 0.0
    """For the push of the weights that the step started from, before it could change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPushed:
    """A step's weights are in the parameter server. `seconds`: what their push took."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is whole on disk."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation of one weight version is done."""

    version: int
    values: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed:
    """A weight version could not be evaluated, and will not be; the next ones may."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSkipped:
    """A weight version is not evaluated because evaluation is behind."""

    version: int


RunEvent = (
    RunBegan
    | PhaseBegan
    | RecordAppended
    | ControlRan
    | TurnEnded
    | RunFinished
    | RunEnded
    | LoopClosed
    | CommandSent
    | ReportReceived
    | InstanceJoined
    | InstanceDown
    | InstanceLost
    | GroupsDrawn
    | WaitingExternal
    | TurnGiven
    | LeftForEnvironment
    | BackFromEnvironment
    | GenerationEnded
    | RewardReceived
    | Released
    | GivenUp
    | StragglerResampled
    | StragglerTruncated
    | BatchTaken
    | StepTrained
    | WeightsPushed
    | CheckpointSaved
    | Evaluated
    | EvaluationFailed
    | EvaluationSkipped
)

Args = ParamSpec("Args")
Handlers = Mapping[type, Callable[[Any], None]]
"""What a listener does, by the type of event."""


class Listener(Protocol):
    """Takes note of some events."""

    def handlers(self) -> Handlers:
        """Asked once. What a handler raises ends the run: OSError, as from a full disk, or RunFailed."""
        ...


class EventStream:
    """Tells each event to all who listen to its type, in the order of the listeners."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self._handlers: dict[object, list[Callable[[Any], None]]] = {}
        for listener in listeners:
            for kind, handler in listener.handlers().items():
                self._handlers.setdefault(kind, []).append(handler)

    def handlers(self) -> Handlers:
        """A stream is a listener too: it tells the events of another stream to its own listeners."""
        return dict.fromkeys([kind for kind in self._handlers if isinstance(kind, type)], self.tell)

    def has(self, kind: type) -> bool:
        """Whether anyone listens to events of this type."""
        return kind in self._handlers

    def emit(self, kind: Callable[Args, RunEvent], *args: Args.args, **kwargs: Args.kwargs) -> None:
        """An event of this type has happened: it is made of the arguments if anyone listens to it."""
        handlers = self._handlers.get(kind)
        if handlers:
            event = kind(*args, **kwargs)
            for handler in handlers:
                handler(event)

    def tell(self, event: RunEvent) -> None:
        """The same for an event that has been made already."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)
