"""The trainer interface: one weight version in, one batch, one weight version out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from staleflow.data.trajectory import TrainBatch
from staleflow.errors import ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """Read by the trainer from the tensors it trained on; goes into the ledger's `trained` record."""

    trajectory_id: str
    min_version: int
    max_version: int
    tokens: int
    """Generated tokens in the loss."""
    token_hash: str
    """`token_hash` of the response ids in the training tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The outcome of one step."""

    version_start: int
    version: int
    """version_start + 1."""
    trained: tuple[TrainedTrajectory, ...]
    metrics: Mapping[str, float]
    """The metrics of docs/metrics.md that begin with `train/`; a trainer may add others with this prefix."""


def nothing() -> None:
    """The default `before_update`: returns at once."""


def warmed_up_rate(learning_rate: float, version: int, warmup_steps: int) -> float:
    """The learning rate of the step at weights `version`; rises linearly over `warmup_steps` versions."""
    return learning_rate * min(1.0, (version + 1) / max(warmup_steps, 1))


def check_step(batch: TrainBatch, version: int) -> None:
    """Raises ProtocolError unless the batch is for the step at weights `version`."""
    if batch.step != version:
        raise ProtocolError(f"the batch is for step {batch.step}, but the weights are version {version}")


def result_of(
    batch: TrainBatch,
    records: Mapping[str, TrainedTrajectory],
    metrics: Mapping[str, float],
    learning_rate: float,
) -> TrainResult:
    """The outcome of a step, from its records by trajectory id and its metrics."""
    members = [member.trajectory.trajectory_id for group in batch.groups for member in group]
    return TrainResult(
        version_start=batch.step,
        version=batch.step + 1,
        trained=tuple(records[member] for member in members),
        metrics={
            **metrics,
            "train/learning_rate": learning_rate,
            "train/trajectories": float(sum(record.tokens > 0 for record in records.values())),
            "train/masked_trajectories": float(sum(record.tokens == 0 for record in records.values())),
        },
    )


class Trainer(Protocol):
    """Owns the model under training and its optimizer."""

    @property
    def version(self) -> int:
        """Current weight version."""
        ...

    def train(self, batch: TrainBatch, before_update: Callable[[], None] = nothing) -> TrainResult:
        """One optimizer update batch. `batch.step` must equal `version`; afterwards version is one more.

        `before_update` is called before each change of the weights. The arrays from `weights` do not change
        until it first returns, so a push can overlap with the next step's first passes.
        """
        ...

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Host views of the weights by their Hugging Face state-dict names.

        Each may be created on access. Valid until the next call, or until the next update's `before_update`
        has returned. Another thread may iterate over the items.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything that resuming needs (weights, optimizer, random state) into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, version included."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...
