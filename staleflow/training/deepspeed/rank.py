"""One rank: a share of every batch, and a shard of the state that the ZeRO stage shards.

Invariants:

- every rank gets the whole batch, computes the same advantages and scales, and takes its share of the rows;
  the loss is summed over ranks, so loss and update do not depend on the number of ranks;
- every rank makes the same number of passes in the same order, with blank micro-batches if it has fewer rows:
  with ZeRO-3 each pass is a sequence of collectives;
- all ranks agree on skipping an update: the decision uses the whole batch and the gradient norm over all
  ranks;
- weights do not change while they are being sent: rank 0 starts an update only after it has received them
  all, and no rank changes a weight before all ranks have computed the gradient norm together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from staleflow.data.trajectory import TrainBatch
from staleflow.training.batching import (
    BLANK,
    MicroBatch,
    TrainingRow,
    blank_micro_batch,
    cuts,
    micro_batches,
    shares,
)
from staleflow.training.deepspeed import checkpoint
from staleflow.training.deepspeed.guarded import GuardedAdamW
from staleflow.training.deepspeed.model_shard import ModelShard
from staleflow.training.deepspeed.process_group import (
    Meeting,
    join,
    leave,
    limit_groups,
    load_deepspeed,
)
from staleflow.training.deepspeed.settings import RankSettings
from staleflow.training.dropout import without_dropout
from staleflow.training.log_probs import token_log_probs
from staleflow.training.models import set_attention
from staleflow.training.objective import RowMeasurements
from staleflow.training.train_metrics import TrainMetrics
from staleflow.training.trainer import TrainedTrajectory, warmed_up_rate

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One rank's result of a step. Picklable."""

    metrics: TrainMetrics
    records: Mapping[str, TrainedTrajectory]
    """By trajectory id, for this rank's rows."""
    learning_rate: float


class Rank(ModelShard):
    """See the module. Methods are called on all ranks at once, in the same order; `send` on peers only."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._reference: Any = None
        self._timeout_s = 0.0

    # ------------------------------------------------------------------ start and end

    def join(self, meeting: Meeting, store: TCPStore | None = None) -> None:
        """Meet the other ranks."""
        self.size = meeting.ranks
        self._timeout_s = meeting.timeout_s
        self.groups = join(self.rank, meeting, store)

    def build(self, settings: RankSettings) -> None:
        """Build model, optimizer and engine; replaces existing ones."""
        deepspeed = load_deepspeed()
        torch.set_num_threads(settings.threads)
        if self.engine is not None:
            self.engine.destroy()
        self.settings, self.updates = settings, 0
        model = settings.make_model()
        set_attention(model, settings.attention)
        model = without_dropout(model, gradient_checkpointing=settings.gradient_checkpointing)
        if settings.make_reference is not None:
            self._reference = settings.make_reference().train(False).requires_grad_(False)
        options: dict[str, Any] = {
            "lr": settings.learning_rate,
            "betas": settings.betas,
            "weight_decay": settings.weight_decay,
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = (
            GuardedAdamW(parameters, max_grad_norm=settings.max_grad_norm, **options)
            if settings.guards_itself
            else torch.optim.AdamW(parameters, **options)
        )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings.deepspeed_config()
        )
        limit_groups(self._timeout_s)
        if self._reference is not None:
            self._reference.to(self.engine.device)

    def leave(self) -> None:
        """Leave the world."""
        leave()

    # ------------------------------------------------------------------ a step

    def train(
        self, batch: TrainBatch, version: int, before_update: Callable[[], None] = lambda: None
    ) -> StepPart:
        """Train on this rank's share of a step at weights `version`.

        `before_update` is called before each change of weights; on rank 0 it waits until they have been sent.
        """
        settings, metrics = self.settings, TrainMetrics()
        rate = warmed_up_rate(settings.learning_rate, version, settings.warmup_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        records: dict[str, TrainedTrajectory] = {}
        rows = settings.objective.lay_out(batch)
        for update in settings.objective.updates(batch, rows, self._measure(rows)):
            micros = self._share(update.rows, update.scales)
            self._apply(micros, update.informative, metrics, before_update)
            for micro in micros:
                records |= {record.trajectory_id: record for record in micro.trained(version)}
        return StepPart(metrics=metrics, records=records, learning_rate=rate)

    def _share(self, rows: Sequence[TrainingRow], scales: NDArray[np.float64]) -> list[MicroBatch]:
        """This rank's rows as micro-batches, with blank ones up to the largest number on any rank."""
        budget, packing = self.settings.micro_batch_tokens, self.settings.packing
        lengths = [len(row.tokens) for row in rows]
        dealt = shares(lengths, self.size)
        count = max(len(cuts([lengths[i] for i in share], budget, packing=packing)) for share in dealt)
        mine = dealt[self.rank]
        device = self.engine.device
        micros = micro_batches([rows[i] for i in mine], scales[mine], budget, device, packing=packing)
        return micros + [blank_micro_batch(rows[0], device) for _ in range(count - len(micros))]

    def _log_probs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        lengths = micro.lengths if self.settings.packing else None
        return token_log_probs(
            model, micro.input_ids, micro.loss_mask, self.settings.temperature, lengths=lengths
        )

    @torch.no_grad()
    def _measure(self, rows: Sequence[Sequence[TrainingRow]]) -> dict[str, RowMeasurements]:
        """The measurements that the objective needs of each row before the first update, from all ranks."""
        needs = self.settings.objective.needs
        if not needs:
            return {}
        mine: dict[str, RowMeasurements] = {}
        for chunk in rows:
            for micro in self._share(chunk, np.zeros(len(chunk))):
                prox = micro.by_row(self._log_probs(self.engine, micro)[0]) if needs.prox else {}
                asked = needs.reference and self._reference is not None
                reference = micro.by_row(self._log_probs(self._reference, micro)[0]) if asked else {}
                for name in micro.trajectory_ids:
                    mine[name] = RowMeasurements(prox=prox.get(name), reference=reference.get(name))
        mine.pop(BLANK, None)
        parts: list[dict[str, RowMeasurements]] = [{} for _ in range(self.size)]
        dist.all_gather_object(parts, mine, group=self.groups.talk)
        return {name: measured for part in parts for name, measured in part.items()}

    def _apply(
        self,
        micros: Sequence[MicroBatch],
        informative: bool,
        metrics: TrainMetrics,
        before_update: Callable[[], None],
    ) -> None:
        """One optimizer update, or a skipped one."""
        loss = 0.0
        for micro in micros:
            with torch.set_grad_enabled(informative):
                part = self.settings.objective.loss(micro, *self._log_probs(self.engine, micro))
            if informative:
                self.engine.backward(part.loss * self.size)  # the engine averages over ranks
            loss += part.record(metrics)
        if not informative:
            metrics.add_update(loss=loss, grad_norm=0.0, applied=False)
            return
        before_update()
        self.engine.step()
        applied = self.engine.was_step_applied()
        self.updates += applied
        norm = float(self.engine.get_global_grad_norm())
        metrics.add_update(loss=loss, grad_norm=norm if applied else math.nan, applied=applied)

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path, version: int) -> None:
        """Write a checkpoint, on rank 0."""
        checkpoint.save(self, folder, version)

    def load(self, folder: Path) -> int:
        """Restore a checkpoint, read by rank 0; returns its version."""
        return checkpoint.load(self, folder)

    # ------------------------------------------------------------------ weights

    def send(self, names: Sequence[str]) -> None:
        """A peer's part of `gather`; may run during a step."""
        for _ in self.gather(names, self.groups.push):
            pass
