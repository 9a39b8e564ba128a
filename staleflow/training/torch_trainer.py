"""A trainer in plain PyTorch.

Invariants:

- one batch is one weight version, whatever number of minibatches (optimizer updates) it is cut into, and
  also when there was nothing to learn from it;
- the update does not depend on how micro-batches are cut;
- an update whose gradient is not finite, or that no token has an advantage for, leaves weights and
  optimizer untouched and is counted in `train/skipped_updates`;
- nothing is drawn at random but the order of groups over minibatches, which is a function of (seed, step):
  training on from a checkpoint gives the same bits as never having stopped.

::

    groups -> rows with advantages -> minibatches -> [log pi_prox, no gradient]
                                          |
                                          v
             micro-batches: forward, loss, backward (gradients add up) -> clip -> AdamW
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from staleflow.data.trajectory import TrainBatch
from staleflow.errors import ProtocolError, RunFailed
from staleflow.training.algorithms.algorithm import Algorithm, Shaping
from staleflow.training.batching import MicroBatch, Row, micro_batches, row_of
from staleflow.training.correction_rules import check_correction
from staleflow.training.corrections import CORRECTIONS
from staleflow.training.log_probs import token_log_probs
from staleflow.training.losses import ClipRange
from staleflow.training.step_metrics import StepMetrics
from staleflow.training.trainer import TrainResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "trainer.pt"


class TorchTrainer:
    """See the module. The model stays on its device; `weights` are views of its parameters on a CPU.

    Raises ConfigError when `correction` is unknown, or `none` with a `bound` above 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: Algorithm,
        correction: str,
        temperature: float,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        warmup_steps: int,
        max_grad_norm: float,
        minibatches: int,
        micro_batch_tokens: int,
        clip_low: float,
        clip_high: float,
        tis_cap: float,
        overlong_buffer: int,
        overlong_penalty: float,
        max_new_tokens: int,
        bound: int,
        seed: int,
        version: int = 0,
    ) -> None:
        check_correction(correction, bound)
        # Dropout off: the ratio to the behaviour log-probs must measure weights, not noise.
        self._model = model.train(False)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._algorithm = algorithm
        self._correct = CORRECTIONS[correction]
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self._minibatches = minibatches
        self._micro_batch_tokens = micro_batch_tokens
        self._clip = ClipRange(low=clip_low, high=clip_high)
        self._tis_cap = tis_cap
        self._shaping = Shaping(
            max_new_tokens=max_new_tokens, overlong_buffer=overlong_buffer, overlong_penalty=overlong_penalty
        )
        self._seed = seed
        self._version = version
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    @property
    def version(self) -> int:
        """Current weight version."""
        return self._version

    def train(self, batch: TrainBatch) -> TrainResult:
        """One batch, one new version. Raises ProtocolError, and changes nothing, for another step's batch."""
        if batch.step != self._version:
            raise ProtocolError(
                f"the batch is of step {batch.step}, but the weights are version {self._version}"
            )
        learning_rate = self._warmed_up_rate()
        metrics = StepMetrics()
        minibatches = [
            micro_batches(rows, self._scales(rows), self._micro_batch_tokens, self._device)
            for rows in self._minibatch_rows(batch)
        ]
        prox: list[list[Tensor | None]] = [[self._prox(m) for m in micros] for micros in minibatches]
        for micros, start in zip(minibatches, prox, strict=True):
            self._update(micros, start, metrics)
        records = {
            record.trajectory_id: record
            for micros in minibatches
            for micro in micros
            for record in micro.trained(self._version)
        }
        members = [member.trajectory.trajectory_id for group in batch.groups for member in group]
        result = TrainResult(
            version_start=self._version,
            version=self._version + 1,
            trained=tuple(records[member] for member in members),
            metrics={
                **metrics.values(),
                "train/learning_rate": learning_rate,
                "train/trajectories": float(sum(record.tokens > 0 for record in records.values())),
                "train/masked_trajectories": float(sum(record.tokens == 0 for record in records.values())),
            },
        )
        self._version += 1
        return result

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """float32 arrays under state-dict names, tied weights under each of theirs.

        On a CPU in float32 they are views: valid until the next `train` or `load`. Else they are copies.
        """
        state = self._model.state_dict()
        return {name: tensor.detach().float().cpu().numpy() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, and the optimizer beside it."""
        self._model.config.save_pretrained(folder)
        save_file(self._untied_weights(), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        state = {
            "version": self._version,
            "optimizer": self._optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises RunFailed when the folder is of another model."""
        tensors = load_file(folder / WEIGHTS_FILE)
        if tensors.keys() != self._untied_weights().keys():
            raise RunFailed(f"the checkpoint {folder} is of another model than this run's")
        try:
            # Not strict: the second name of a tied weight is not in the file.
            self._model.load_state_dict(tensors, strict=False)
        except RuntimeError as error:
            raise RunFailed(f"the checkpoint {folder} is of another model than this run's") from error
        state = torch.load(folder / STATE_FILE, map_location=self._device, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"].cpu())
        self._version = int(state["version"])

    def close(self) -> None:
        """Nothing to free: memory goes with the object."""

    def _warmed_up_rate(self) -> float:
        """Set and return this step's learning rate: linear over the first `warmup_steps` versions."""
        rate = self._learning_rate * min(1.0, (self._version + 1) / max(self._warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _minibatch_rows(self, batch: TrainBatch) -> Iterator[list[Row]]:
        """Rows of each optimizer update; groups are kept whole, and their order is drawn when it matters."""
        groups = list(batch.groups)
        count = min(self._minibatches, len(groups))
        if count > 1:
            order = np.random.default_rng([self._seed, batch.step]).permutation(len(groups))
            groups = [groups[i] for i in order]
        for chunk in np.array_split(np.arange(len(groups)), count) if count else []:
            rows = []
            for group in (groups[i] for i in chunk):
                advantages = self._algorithm.advantages(group, self._shaping)
                rows += [row_of(member, float(a)) for member, a in zip(group, advantages, strict=True)]
            yield rows

    def _scales(self, rows: list[Row]) -> NDArray[np.float64]:
        loss_tokens = np.array([row.loss_tokens for row in rows], dtype=np.int64)
        return self._algorithm.token_scale(loss_tokens, self._shaping.max_new_tokens)

    @torch.no_grad()
    def _prox(self, micro: MicroBatch) -> Tensor | None:
        """Log-probs under the weights at the step's start; None: take those of the update's own forward.

        With a single update nothing moves in between, so the second forward pass would give the same.
        """
        if self._minibatches == 1:
            return None
        return token_log_probs(self._model, micro.input_ids, micro.loss_mask, self._temperature)[0]

    def _update(self, micros: list[MicroBatch], prox: list[Tensor | None], metrics: StepMetrics) -> None:
        """One optimizer update, or a skipped one."""
        informative = any(bool((m.loss_mask & (m.advantages != 0)).any()) for m in micros)
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro, start in zip(micros, prox, strict=True):
            if bool(micro.loss_mask.any()):
                loss += self._accumulate(micro, start, informative, metrics)
        if not informative:
            metrics.add_update(loss=loss, grad_norm=0.0, applied=False)
            return
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        applied = math.isfinite(grad_norm)
        if applied:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        metrics.add_update(loss=loss, grad_norm=grad_norm, applied=applied)

    def _accumulate(
        self, micro: MicroBatch, prox: Tensor | None, with_gradient: bool, metrics: StepMetrics
    ) -> float:
        """Forward, and backward if wanted; returns this micro-batch's part of the loss."""
        with torch.set_grad_enabled(with_gradient):
            theta, entropy = token_log_probs(self._model, micro.input_ids, micro.loss_mask, self._temperature)
            prox = theta.detach() if prox is None else prox
            factors = self._correct(theta, prox, micro.behaviour, self._tis_cap)
            token_loss = self._algorithm.token_loss(
                factors.log_ratio, micro.advantages, micro.loss_mask, self._clip
            )
            weighted = token_loss.loss * factors.weight * micro.scale
            loss = weighted[micro.loss_mask].sum()
        if with_gradient:
            torch.autograd.backward(loss)
        metrics.add_tokens(
            mask=micro.loss_mask,
            prox=prox,
            behaviour=micro.behaviour,
            entropy=entropy,
            clipped=token_loss.clipped,
            weight=factors.weight,
            informative=micro.advantages != 0,
        )
        return float(loss.detach())

    def _untied_weights(self) -> dict[str, Tensor]:
        """The state dict with each tied weight under its first name only, as safetensors wants it."""
        seen: set[int] = set()
        untied = {}
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:
                seen.add(tensor.data_ptr())
                untied[name] = tensor.detach().contiguous()
        return untied
