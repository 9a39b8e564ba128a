"""The trainer interface: one weight version in, one batch, one weight version out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from staleflow.data.trajectory import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """What the trainer itself read off the tensors it trained on; goes into the ledger's `trained` record."""

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
    """`train/...` names of DESIGN section 6."""


class Trainer(Protocol):
    """Owns the model under training and its optimizer."""

    @property
    def version(self) -> int:
        """Current weight version."""
        ...

    def train(self, batch: TrainBatch) -> TrainResult:
        """One optimizer update batch. `batch.step` must equal `version`; afterwards version is one more."""
        ...

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Host views of the weights under their Hugging Face state-dict names; valid until the next call."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that resuming needs (weights, optimizer, random state) into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, version included."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...
