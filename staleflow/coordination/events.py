"""What `Control` takes in: events, each a fact that has already happened, and reports of rollout instances.

Ids, lengths and versions only; token payload never passes through `Control`.

Types created for every trajectory are named tuples: cheaper to create than frozen dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from staleflow.protocol.records import Trained

# ---------------------------------------------------------------------- reports of an instance


class Rejection(NamedTuple):
    """A command that the instance refused; it changed nothing there."""

    seq: int
    trajectory_id: str | None
    """None for a Pull."""
    reason: str
    stale_version: bool = False
    """A Route refused because the loaded version is below min_version. Not a failure of the trajectory."""


class TrajectoryReport(NamedTuple):
    """A trajectory that left the engine, finished or interrupted."""

    trajectory_id: str
    length: int
    """Prompt and response tokens."""
    min_version: int | None
    """V_traj; None when nothing was generated."""
    finish_reason: str | None = None
    """None for an interrupted trajectory."""


class InstanceReport(NamedTuple):
    """What changed on one instance since its last report, and its present load."""

    instance: str
    incarnation: int
    revision: int
    """Increases by one with every report of an incarnation."""
    version: int
    """Loaded weight version."""
    acked_seq: int
    """Every command up to this sequence number was applied or rejected."""
    rejections: tuple[Rejection, ...] = ()
    finished: tuple[TrajectoryReport, ...] = ()
    interrupted: tuple[TrajectoryReport, ...] = ()
    aborted: tuple[str, ...] = ()
    lengths: tuple[tuple[str, int], ...] = ()
    """(trajectory id, length) of resident trajectories that grew since last listed; sent now and then."""
    running: int = 0
    waiting: int = 0
    """In the engine's own queue: accepted by the instance, not yet in the KV cache."""
    kv_tokens: int = 0
    kv_capacity: int = 0
    """Tokens the KV cache can hold."""
    preemptions: int = 0
    """Since the incarnation started."""
    generated_tokens: int = 0
    """Since the incarnation started."""
    busy_seconds: float = 0.0
    """Time spent decoding since the incarnation started."""
    pull_seconds: float = 0.0
    """Decoding time lost to pulls since the incarnation started, rebuilding KV included."""
    rebuilt_tokens: int = 0
    """Tokens of running trajectories whose KV was rebuilt in pulls since the incarnation started."""
    pulls: int = 0
    """Pulls that loaded weights since the incarnation started."""
    interrupt_seconds: float = 0.0
    """Time spent removing trajectories for Interrupts since the incarnation started."""
    abort_seconds: float = 0.0
    """The same for Aborts."""
    route_seconds: float = 0.0
    """Time spent accepting trajectories since the incarnation started (their prefill is decoding time)."""
    decode_steps: int = 0
    """Steps that decoded anything since the incarnation started; they took `busy_seconds`."""
    running_steps: int = 0
    """Sum over those steps of the trajectories decoded."""
    kv_token_steps: int = 0
    """Sum over those steps of the tokens of these trajectories, before each step adds its own."""
    prefilled_tokens: int = 0
    """Tokens whose KV was built in those steps, for trajectories that joined. Pulls are not included."""


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance is up with weights loaded; any earlier incarnation of it is gone."""

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
    """(trajectory id, length) of its trajectories in the trajectory server: the tokens that were reported."""
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
    """The prompt was in a spare group that expired; this group is never swapped out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsDrawn:
    """The answer to DrawGroups. Fewer groups than requested do not mean the end; SourceExhausted does."""

    groups: tuple[DrawnGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExhausted:
    """The prompt source has no prompts left in its epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingExternal:
    """The environment of a generated trajectory will answer later."""

    trajectory_id: str
    limit_s: float
    """Seconds after which the trajectory counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGiven:
    """The environment added tokens: the trajectory continues from this length."""

    trajectory_id: str
    length: int
    """Prompt and response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The environment of a waiting trajectory adds nothing: the trajectory is being scored."""

    trajectory_id: str


class Rewarded(NamedTuple):
    """A trajectory was scored."""

    trajectory_id: str
    raw: float
    """The verifier's own score."""
    usable: bool
    """False: masked, so it counts in neither loss, statistics nor filter."""
    token_hash: str
    """Hash of the response ids; the ledger proves with it that the sampled tokens are the trained ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """The trainer finished an update and lists what it trained on."""

    record: Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFree:
    """The trainer has the weights of `version` and takes the next batch, although their push is under way.

    Optional: Pushed implies it.
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
    | TurnGiven
    | Ended
    | Rewarded
    | TrainedStep
    | TrainerFree
    | Pushed
    | StopRequested
)
