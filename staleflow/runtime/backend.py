"""The seam between the run loop and where the parts run: orders go in, messages come out.

Two back ends: `inline` (one process, deterministic) and `ray` (an actor for each part). An order never
blocks; what comes of it arrives as a message from `poll`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from staleflow.coordination.actions import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.trajectory import Reward, TrainBatch, Trajectory
from staleflow.rollout.instance import InstanceUpdate
from staleflow.training.trainer import TrainResult


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDown:
    """An instance died, failed or stopped answering. If it is started again, an InstanceJoined follows."""

    instance: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUpdated:
    """A report with its payload."""

    update: InstanceUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Rewards of trajectories handed to `score`; each is answered exactly once."""

    rewards: tuple[tuple[str, Reward], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The trainer finished a step and takes the next batch. WeightsPushed follows.

    Where the step's end waited for its push (a simulation) `push_s` says how long that took.
    """

    result: TrainResult
    update_s: float
    """Without what it waited for the push before it."""
    waited_s: float = 0.0
    """For the push of the weights that the step started from, before it could change them."""
    push_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPushed:
    """A step's weights are in the parameter server. `seconds`: what their push took."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUp:
    """The trainer is there and its weights of `version` are in the parameter server."""

    version: int
    push_s: float


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
class PartFailed:
    """A part without which the run cannot go on is gone for good."""

    part: str
    reason: str
    blame_user: bool = False
    """The input is wrong, rather than the run unlucky."""


Message = (
    InstanceJoined
    | InstanceDown
    | InstanceUpdated
    | Scored
    | StepTrained
    | WeightsPushed
    | TrainerUp
    | CheckpointSaved
    | Evaluated
    | EvaluationFailed
    | PartFailed
)


class Backend(Protocol):
    """Where rollout instances, reward workers, trainer, evaluator and parameter server run."""

    def start(self) -> None:
        """Begin starting every part; TrainerUp and InstanceJoined messages follow."""
        ...

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Send commands, in order, with the payload of each Route's trajectory."""
        ...

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Have trajectories scored; Scored follows."""
        ...

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """Train, then push; StepTrained and WeightsPushed follow.

        `hold` keeps the new version for `evaluate`. The next batch may be handed over before the push is
        over: its passes run meanwhile, and its update waits.
        """
        ...

    def save(self, version: int) -> None:
        """Write a checkpoint of the trainer's present state; CheckpointSaved follows."""
        ...

    def evaluate(self, version: int) -> None:
        """Evaluate a held version; Evaluated follows, and the version is let go."""
        ...

    def release(self, version: int) -> None:
        """Let a held version go that is not evaluated after all."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """What has happened; waits up to `timeout_s` for the first message."""
        ...

    def close(self) -> None:
        """End every part, whatever state it is in. May be called twice."""
        ...
