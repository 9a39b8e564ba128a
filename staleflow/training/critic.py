"""The critic: estimates the future reward before each token.

Invariants:

- entry t of its values is for the state before token t: it has seen the tokens before t, but not t itself;
- it has its own model, optimizer and learning rate: it affects the policy only through the advantages;
- before its first update its value is 0 everywhere (its head starts at zero), whatever the model under it;
- an update with a gradient that is not finite leaves it unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from staleflow.errors import RunFailed
from staleflow.training.batching import MicroBatch
from staleflow.training.losses import value_loss
from staleflow.training.objective import Update

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "critic.safetensors"
STATE_FILE = "critic.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """The outcome of one update of the critic."""

    loss: float
    grad_norm: float
    """Before clipping."""
    clip_frac: float
    """Share of tokens whose value was clipped."""


def critic_metrics(updates: Sequence[Update], done: Sequence[CriticUpdate]) -> dict[str, float]:
    """`train/critic/...`: means over the step's updates; empty without a critic.

    `explained_variance` is `1 - Var(return - value) / Var(return)` over the step's tokens with the values at
    its start: 1 for a perfect critic; 0 for one that predicts only the mean, or if all returns are equal.
    """
    if not done:
        return {}
    rows = [row for update in updates for row in update.rows if row.values is not None]
    returns = np.concatenate([row.returns[row.loss_mask] for row in rows if row.returns is not None])
    values = np.concatenate([row.values[row.loss_mask] for row in rows if row.values is not None])
    spread = float(returns.var()) if len(returns) else 0.0
    return {
        "train/critic/loss": sum(update.loss for update in done) / len(done),
        "train/critic/grad_norm": sum(update.grad_norm for update in done) / len(done),
        "train/critic/clip_frac": sum(update.clip_frac for update in done) / len(done),
        "train/critic/explained_variance": 1 - float((returns - values).var()) / spread if spread else 0.0,
    }


class Critic:
    """A value head on the body of a causal language model; see the module."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        max_grad_norm: float,
        value_clip: float,
    ) -> None:
        """`model` belongs to this critic; its language head is not used. `value_clip` 0: no clip."""
        body = model.base_model
        width: int = model.config.hidden_size
        head = nn.Linear(width, 1).to(device=model.device, dtype=torch.float32)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        # Dropout off: training and inference must compute the same function.
        self._net = nn.ModuleDict({"body": body, "head": head}).train(False)
        self._parameters = [p for p in self._net.parameters() if p.requires_grad]
        self._max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self._value_clip = value_clip
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    def values(self, micro: MicroBatch) -> Tensor:
        """The value before each token, shape (rows, length); 0 before the first of a row."""
        hidden = self._net["body"](input_ids=micro.input_ids, use_cache=False).last_hidden_state
        before = self._net["head"](hidden[:, :-1].float()).squeeze(-1)
        return nn.functional.pad(before, (1, 0))

    def update(self, micros: Sequence[MicroBatch]) -> CriticUpdate:
        """One optimizer update towards the rows' returns; every micro-batch has `values` and `returns`."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, clipped, tokens = 0.0, 0, 0
        for micro in micros:
            mask = micro.loss_mask
            if micro.values is None or micro.returns is None:
                raise ValueError("a critic's update needs rows with values and returns")
            if not bool(mask.any()):
                continue
            per_token = value_loss(self.values(micro), micro.values, micro.returns, self._value_clip)
            part = (per_token.loss * micro.scale)[mask].sum()
            torch.autograd.backward(part)
            loss += float(part.detach())
            clipped += int(per_token.clipped[mask].sum())
            tokens += int(mask.sum())
        grad_norm = 0.0
        if tokens:
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
            if math.isfinite(grad_norm):
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return CriticUpdate(loss=loss, grad_norm=grad_norm, clip_frac=clipped / max(tokens, 1))

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into the policy's folder."""
        save_file(
            {n: t.detach().contiguous() for n, t in self._net.state_dict().items()}, folder / WEIGHTS_FILE
        )
        torch.save(self._optimizer.state_dict(), folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises RunFailed if the folder has no critic of this shape."""
        if not (folder / WEIGHTS_FILE).is_file():
            raise RunFailed(f"the checkpoint {folder} has no critic: another algorithm wrote it")
        try:
            self._net.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except RuntimeError as error:
            raise RunFailed(f"the critic in the checkpoint {folder} is of another model") from error
        device = self._parameters[0].device
        self._optimizer.load_state_dict(
            torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
        )
