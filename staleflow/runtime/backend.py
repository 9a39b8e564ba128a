"""The seams of the run loop: a backend runs the parts, a trajectory store keeps what they make.

Three backends: `inline` (one process, deterministic), `ray` (an actor for each part) and `simulated` (a model
of the parts on a virtual clock). Orders go in and never block; what comes of them arrives as messages from
`poll`.

`P` is the payload of a trajectory as the backend knows it, `B` a batch of them: tokens in a real run, lengths
alone in a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from staleflow.coordination.actions import Command
from staleflow.coordination.events import DrawnGroup, InstanceJoined
from staleflow.data.environment import Answer
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.responses import Balance, LateTokens, Response, Scored
from staleflow.data.trajectory import Reward, Trajectory
from staleflow.protocol.records import Record, TrainedMember
from staleflow.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    InstanceDown,
    StepTrained,
    WeightsPushed,
)
from staleflow.training.trainer import TrainResult


class RewardsReady(NamedTuple):
    """Rewards of trajectories handed to `score`; each is answered exactly once."""

    rewards: tuple[tuple[str, Reward], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentsAnswered:
    """What environments said to trajectories handed to `respond`; each is answered exactly once."""

    answers: tuple[tuple[str, Answer], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUp:
    """The trainer is there and its weights of `version` are in the parameter server."""

    version: int
    push_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFailed:
    """A part without which the run cannot go on is gone for good."""

    part: str
    reason: str
    blame_user: bool = False
    """The input is wrong, rather than the run unlucky."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUp:
    """The run goes no further than this moment, whatever is under way."""


Message = (
    InstanceJoined
    | InstanceDown
    | InstanceUpdate
    | RewardsReady
    | EnvironmentsAnswered
    | StepTrained
    | WeightsPushed
    | TrainerUp
    | CheckpointSaved
    | Evaluated
    | EvaluationFailed
    | PartFailed
    | TimeUp
)


def step_trained(result: TrainResult, *, update_s: float, waited_s: float = 0.0) -> StepTrained:
    """The message that says what a trainer returned."""
    return StepTrained(
        step=result.version_start,
        trained=tuple(
            TrainedMember(
                id=t.trajectory_id, min=t.min_version, max=t.max_version, tokens=t.tokens, hash=t.token_hash
            )
            for t in result.trained
        ),
        metrics=result.metrics,
        update_s=update_s,
        waited_s=waited_s,
    )


class Environments(Protocol):
    """What asks the environments of trajectories, without blocking: `data.environment_pool`."""

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask what follows each; every one is answered exactly once."""
        ...

    def poll(self, timeout_s: float) -> Sequence[tuple[str, Answer]]:
        """Answers by trajectory id; waits up to `timeout_s` for the first."""
        ...

    def close(self) -> None:
        """Ask no more; may be called twice."""
        ...


class Batch(Protocol):
    """The groups of one training step, in the order in which the protocol consumed them."""

    @property
    def step(self) -> int:
        """The buffer consumed."""
        ...

    @property
    def groups(self) -> Sequence[Sequence[Scored]]:
        """Their kept members."""
        ...


P = TypeVar("P", bound=Response)
B = TypeVar("B", bound=Batch)
P_co = TypeVar("P_co", bound=Response, covariant=True)
B_co = TypeVar("B_co", bound=Batch, covariant=True)
P_contra = TypeVar("P_contra", bound=Response, contravariant=True)
B_contra = TypeVar("B_contra", bound=Batch, contravariant=True)


class Ledger(Protocol):
    """Where records go: `storage.LedgerWriter`."""

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Append a record."""
        ...

    def flush(self, *, sync: bool = False) -> None:
        """Hand everything to the operating system; `sync`: to the disk."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Backend(Protocol[P_contra, B_contra]):
    """Where rollout instances, environments, reward workers, trainer, evaluator and parameter server run."""

    @property
    def more_now(self) -> bool:
        """Whether `poll` would return a message without any time passing: a coordination cycle of this
        moment comes after it. Always False where time passes by itself.
        """
        ...

    def start(self) -> None:
        """Begin starting every part; TrainerUp and InstanceJoined messages follow."""
        ...

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, P_contra]) -> None:
        """Send commands, in order, with the payload of each Route's trajectory."""
        ...

    def respond(self, trajectories: Sequence[P_contra]) -> None:
        """Ask the environments what follows; EnvironmentsAnswered follows."""
        ...

    def score(self, trajectories: Sequence[P_contra]) -> None:
        """Have trajectories scored; RewardsReady follows."""
        ...

    def train(self, batch: B_contra, *, hold: bool) -> None:
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

    def poll(self, until: float) -> Sequence[Message]:
        """What has happened; waits for the first message, at most until the run's clock reads `until`."""
        ...

    def close(self) -> None:
        """End every part, whatever state it is in. May be called twice."""
        ...


class TrajectoryStore(Protocol[P_co, B_co]):
    """The payload of every living trajectory, and the account of every token: `servers.TrajectoryServer`."""

    @property
    def balance(self) -> Balance:
        """The account of generated tokens."""
        ...

    def draw(self, count: int, *, padding: bool = False) -> tuple[tuple[DrawnGroup, ...], bool]:
        """Create up to `count` groups. The flag says that the source is exhausted."""
        ...

    def find(self, trajectory_id: str) -> P_co | None:
        """Payload of a trajectory; None when it is gone."""
        ...

    def get(self, trajectory_id: str) -> P_co:
        """Payload of a living trajectory."""
        ...

    def lengths(self, trajectory_ids: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Length of each of these that is alive, in tokens, prompt included."""
        ...

    def payloads(self, commands: Sequence[Command]) -> Mapping[str, P_co]:
        """What instances need to carry out commands: the payload of each Route's trajectory that is alive."""
        ...

    def absorb(self, update: InstanceUpdate) -> Sequence[LateTokens]:
        """Add what an instance generated; returns what came for trajectories that are gone."""
        ...

    def answer(self, trajectory_id: str, answer: Any) -> P_co:
        """Apply what the environment said; returns the trajectory as it is now."""
        ...

    def give_up(self, trajectory_id: str) -> None:
        """Mark a trajectory as failed."""
        ...

    def truncate(self, trajectory_id: str) -> P_co:
        """A trajectory is complete as it is, as if its token budget were used up."""
        ...

    def resample(self, trajectory_id: str, new_id: str) -> P_co:
        """Drop an aborted trajectory for another of the same prompt; returns its payload as it was."""
        ...

    def rewarded(self, trajectory_id: str, reward: Reward) -> str:
        """Keep the reward; returns the hash of the response ids."""
        ...

    def batch(self, step: int, groups: Sequence[tuple[str, Sequence[str]]], final: bool) -> B_co:
        """Take the payload of consumed groups out, for the trainer."""
        ...

    def trained(self, step: int) -> None:
        """The batch of `step` has been trained on."""
        ...

    def discard(self, trajectory_ids: Sequence[str], reason: str) -> Sequence[P_co]:
        """Drop released trajectories; returns their payload as it was."""
        ...
