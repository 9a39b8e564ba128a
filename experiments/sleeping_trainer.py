"""A trainer that only takes its time: for real runs in which nothing but the system itself is at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.config.schema import Config
from staleflow.data.trajectory import TrainBatch, token_hash
from staleflow.training.trainer import TrainedTrajectory, Trainer, TrainResult, nothing

FIXED_S = 1.0
TOKEN_S = 2e-4
"""Seconds of a step, and of each token of its prompts and responses."""


class SleepingTrainer:
    """A `training.trainer.Trainer` without a model."""

    def __init__(self, *, config: Config) -> None:
        self._version = 0
        self._weights = {"nothing": np.zeros(1024, dtype=np.float32)}

    @property
    def version(self) -> int:
        """Batches trained on."""
        return self._version

    def train(self, batch: TrainBatch, before_update: Callable[[], None] = nothing) -> TrainResult:
        """Sleep as long as the batch would take."""
        members = [scored.trajectory for group in batch.groups for scored in group]
        time.sleep(FIXED_S + TOKEN_S * sum(t.length for t in members))
        before_update()
        self._version += 1
        trained = tuple(
            TrainedTrajectory(
                trajectory_id=t.trajectory_id,
                min_version=batch.step if t.min_version is None else t.min_version,
                max_version=batch.step if t.max_version is None else t.max_version,
                tokens=t.response_len,
                token_hash=token_hash(t.tokens),
            )
            for t in members
        )
        return TrainResult(version_start=batch.step, version=self._version, trained=trained, metrics={})

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """A few zeros."""
        return self._weights

    def save(self, folder: Path) -> None:
        """Write the version."""
        (folder / "version").write_text(str(self._version), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read it back."""
        self._version = int((folder / "version").read_text(encoding="utf-8"))

    def close(self) -> None:
        """There is nothing to free."""


_IS_A_TRAINER: type[Trainer] = SleepingTrainer
