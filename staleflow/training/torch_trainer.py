"""A trainer in plain PyTorch.

Invariants:

- one batch gives one weight version, whatever its number of minibatches (optimizer updates), and even if it
  gave no signal;
- the update does not depend on how micro-batches are cut;
- an update without signal, or with a gradient that is not finite, leaves weights and optimizer unchanged and
  counts in `train/skipped_updates`;
- the reference model never changes and is not in checkpoints; the critic is;
- the only randomness is the order of groups over minibatches, a function of (seed, step): continuing from a
  checkpoint gives the same bits as an uninterrupted run.

::

    groups -> minibatches of rows -> [measured before any update, no gradient] -> advantages
                                                                                       |
                                                                                       v
                      micro-batches: forward, loss, backward (gradients add up) -> clip -> AdamW

The trainer has the models, the backward pass and the optimizer; the rest is in `Objective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from staleflow.data.trajectory import FloatArray, TrainBatch
from staleflow.errors import RunFailed
from staleflow.training.batching import MicroBatch, TrainingRow, micro_batches
from staleflow.training.critic import Critic, critic_metrics
from staleflow.training.dropout import without_dropout
from staleflow.training.host_weights import HostWeights
from staleflow.training.log_probs import token_log_probs
from staleflow.training.objective import Objective, RowMeasurements
from staleflow.training.train_metrics import TrainMetrics
from staleflow.training.trainer import (
    TrainedTrajectory,
    TrainResult,
    check_step,
    nothing,
    result_of,
    warmed_up_rate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "trainer.pt"


class TorchTrainer:
    """See the module. The model stays on its device; `weights` are views of its parameters on a CPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        objective: Objective,
        temperature: float,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        warmup_steps: int,
        max_grad_norm: float,
        micro_batch_tokens: int,
        reference: PreTrainedModel | None = None,
        critic: Critic | None = None,
        packing: bool = False,
        gradient_checkpointing: bool = False,
        version: int = 0,
    ) -> None:
        """`reference` and `critic` must be given exactly if the objective needs them. Raises ValueError.

        `packing` and `gradient_checkpointing` apply to the policy, not to the critic.
        """
        needs = objective.needs
        if needs.reference != (reference is not None) or needs.values != (critic is not None):
            raise ValueError(f"the objective needs {needs}, but got reference {reference}, critic {critic}")
        # Dropout off: the ratio to the behaviour log-probs must measure weights, not noise.
        self._model = without_dropout(model, gradient_checkpointing=gradient_checkpointing)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._objective = objective
        self._reference = None if reference is None else reference.train(False).requires_grad_(False)
        self._critic = critic
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self._micro_batch_tokens = micro_batch_tokens
        self._packing = packing
        self._version = version
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    @property
    def version(self) -> int:
        """Current weight version."""
        return self._version

    def train(self, batch: TrainBatch, before_update: Callable[[], None] = nothing) -> TrainResult:
        """Train on one batch, which gives one new version. Raises ProtocolError, and changes nothing, for the
        batch of another step."""
        check_step(batch, self._version)
        learning_rate = self._warmed_up_rate()
        metrics = TrainMetrics()
        rows = self._objective.lay_out(batch)
        updates = self._objective.updates(batch, rows, self._measure(rows))
        records: dict[str, TrainedTrajectory] = {}
        critic_updates = []
        for update in updates:
            micros = self._cut(update.rows, update.scales)
            self._apply(micros, update.informative, metrics, before_update)
            if self._critic is not None:
                critic_updates.append(self._critic.update(micros))
            for micro in micros:
                records |= {record.trajectory_id: record for record in micro.trained(self._version)}
        result = result_of(
            batch, records, {**metrics.values(), **critic_metrics(updates, critic_updates)}, learning_rate
        )
        self._version += 1
        return result

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """float32 arrays by state-dict name, tied weights under each of their names.

        On a CPU in float32 they are views: valid until the next update or `load`. Otherwise they are copies,
        each created on access.
        """
        return HostWeights(self._model.state_dict())

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, with the optimizer in it."""
        self._model.config.save_pretrained(folder)
        save_file(self._untied_weights(), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        state = {
            "version": self._version,
            "optimizer": self._optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, folder / STATE_FILE)
        if self._critic is not None:
            self._critic.save(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises RunFailed if the folder is of another model."""
        tensors = load_file(folder / WEIGHTS_FILE)
        if tensors.keys() != self._untied_weights().keys():
            raise RunFailed(f"the checkpoint {folder} is of another model than this run's")
        try:
            # Not strict: the second name of a tied weight is not in the file.
            self._model.load_state_dict(tensors, strict=False)
        except RuntimeError as error:
            raise RunFailed(f"the checkpoint {folder} is of another model than this run's") from error
        if self._critic is not None:
            self._critic.load(folder)
        state = torch.load(folder / STATE_FILE, map_location=self._device, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"].cpu())
        self._version = int(state["version"])

    def close(self) -> None:
        """Nothing to free: memory is freed with the object."""

    def _warmed_up_rate(self) -> float:
        """Set and return this step's learning rate."""
        rate = warmed_up_rate(self._learning_rate, self._version, self._warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _cut(self, rows: Sequence[TrainingRow], scales: NDArray[np.float64]) -> list[MicroBatch]:
        return micro_batches(rows, scales, self._micro_batch_tokens, self._device, packing=self._packing)

    @torch.no_grad()
    def _measure(self, rows: Sequence[Sequence[TrainingRow]]) -> dict[str, RowMeasurements]:
        """The measurements that the objective needs of each row before the first update."""
        needs = self._objective.needs
        measured: dict[str, RowMeasurements] = {}
        if not needs:
            return measured
        for chunk in rows:
            for micro in self._cut(chunk, np.zeros(len(chunk))):
                prox = self._rows_of(micro, self._model) if needs.prox else {}
                reference = self._rows_of(micro, self._reference) if self._reference is not None else {}
                values = micro.by_row(self._critic.values(micro)) if self._critic is not None else {}
                for name in micro.trajectory_ids:
                    measured[name] = RowMeasurements(
                        prox=prox.get(name), reference=reference.get(name), values=values.get(name)
                    )
        return measured

    def _rows_of(self, micro: MicroBatch, model: PreTrainedModel) -> dict[str, FloatArray]:
        return micro.by_row(self._log_probs(micro, model)[0])

    def _log_probs(self, micro: MicroBatch, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        lengths = micro.lengths if self._packing else None
        return token_log_probs(model, micro.input_ids, micro.loss_mask, self._temperature, lengths=lengths)

    def _apply(
        self,
        micros: list[MicroBatch],
        informative: bool,
        metrics: TrainMetrics,
        before_update: Callable[[], None],
    ) -> None:
        """One optimizer update, or a skipped one."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro in micros:
            if bool(micro.loss_mask.any()):
                with torch.set_grad_enabled(informative):
                    part = self._objective.loss(micro, *self._log_probs(micro, self._model))
                if informative:
                    torch.autograd.backward(part.loss)
                loss += part.record(metrics)
        if not informative:
            metrics.add_update(loss=loss, grad_norm=0.0, applied=False)
            return
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        applied = math.isfinite(grad_norm)
        if applied:
            before_update()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        metrics.add_update(loss=loss, grad_norm=grad_norm, applied=applied)

    def _untied_weights(self) -> dict[str, Tensor]:
        """The state dict with each tied weight under its first name only, as safetensors requires."""
        seen: set[int] = set()
        untied = {}
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:
                seen.add(tensor.data_ptr())
                untied[name] = tensor.detach().contiguous()
        return untied
