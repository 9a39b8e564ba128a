"""The trainer interface over a world of DeepSpeed ranks.

Invariant: for the caller this is one trainer like any other. The number of ranks and their shards change
losses and weights only by rounding.

::

    batch ──> rank 0 .. n, each its share of the rows ──> parts of metrics and records ──> one TrainResult
    weights() <── rank 0: its own (ZeRO 0 to 2), or gathered parameter by parameter (ZeRO 3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from staleflow.data.trajectory import TrainBatch
from staleflow.training.deepspeed.rank import StepPart
from staleflow.training.deepspeed.settings import RankSettings
from staleflow.training.deepspeed.world import World
from staleflow.training.host_weights import GatheredWeights, HostWeights
from staleflow.training.train_metrics import TrainMetrics
from staleflow.training.trainer import TrainResult, check_step, nothing, result_of


class DeepSpeedTrainer:
    """See the module. Owns the world: `close` ends its ranks."""

    def __init__(self, world: World, settings: RankSettings, *, start_timeout_s: float) -> None:
        """Build model and engine on every rank.

        Raises ConfigError if the model cannot be loaded, RunFailed if a rank fails or takes longer than
        `start_timeout_s`.
        """
        self._world = world
        self._settings = settings
        self._version = 0
        try:
            world.run("build", settings, limit_s=start_timeout_s)
        except BaseException:
            world.close()
            raise

    @property
    def version(self) -> int:
        """Current weight version."""
        return self._version

    def train(self, batch: TrainBatch, before_update: Callable[[], None] = nothing) -> TrainResult:
        """See `Trainer`. Raises RunFailed if a rank dies, fails or hangs; it can then only be closed."""
        version = self._version
        check_step(batch, version)
        parts: list[StepPart] = self._world.run(
            "train", batch, version, own=lambda: self._world.rank.train(batch, version, before_update)
        )
        self._version += 1
        records = {name: record for part in parts for name, record in part.records.items()}
        metrics = TrainMetrics.merged([part.metrics for part in parts]).values()
        return result_of(batch, records, metrics, parts[0].learning_rate)

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """float32 arrays by state-dict name, tied weights under each of their names, created one by one.

        With ZeRO-3 each is gathered while iterating over the items, which another thread may do while the
        next step's passes run.
        """
        rank = self._world.rank
        if self._settings.zero_stage < 3:
            return HostWeights(rank.tensors())
        return GatheredWeights(rank.names, self._gather)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that any number of ranks and any stage can load."""
        self._world.run("save", folder, self._version)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises RunFailed if the folder is of another model."""
        self._version = self._world.run("load", folder)[0]

    def close(self) -> None:
        """End the ranks."""
        self._world.close()

    def _gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        own = self._world.rank.gather(names, self._world.rank.groups.push)
        yield from self._world.send("send", tuple(names), own=own)
