"""Means over all tokens of a training step, accumulated over micro-batches.

Invariant: every value is finite for finite inputs; a step without a token in the loss gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

ALWAYS = (
    "kl",
    "entropy",
    "clip_frac",
    "logprob_abs_diff",
    "correction_weight_mean",
    "correction_masked_frac",
    "informative_ratio",
)
"""Present in every step; other metrics only if they apply."""


class TrainMetrics:
    """`train/...` values of DESIGN section 6.

    - `kl`: behaviour KL, the k3 estimate of KL(behaviour || prox): mean of `x - 1 - log x` with
      `x = prox / behaviour`, over the tokens that behaviour sampled; in nats per token, never negative;
    - `logprob_abs_diff`: mean of `|log prox - log behaviour|`;
    - `entropy`: of the policy under training at the sampling temperature;
    - `clip_frac`: share of tokens where the clip was active;
    - `correction_weight_mean`: 1 for corrections without a weight;
    - `correction_masked_frac`: share of tokens that the correction masked (weight 0);
    - `reference_kl`: k3 estimate of KL(theta || reference), with a reference model only;
    - `informative_ratio`: share of tokens whose advantage is not zero; 0: the step had no signal;
    - `loss`, `grad_norm` (before clipping): means over the step's updates;
    - `skipped_updates`: updates not applied, because no advantage or no finite gradient existed;
    - `nonfinite_updates`: skipped updates whose gradient was not finite.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys(ALWAYS, 0.0)
        self._tokens = 0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._skipped = 0

    def add_tokens(self, values: Mapping[str, Tensor], count: int) -> None:
        """Add one micro-batch: by name, the values of its `count` tokens in the loss."""
        for name, of_tokens in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(of_tokens.detach().double().sum())
        self._tokens += count

    def add_update(self, *, loss: float, grad_norm: float, applied: bool) -> None:
        """Add one optimizer update."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._skipped += not applied

    @staticmethod
    def merged(parts: Sequence[TrainMetrics]) -> TrainMetrics:
        """The metrics of a step whose tokens were spread over ranks; each rank recorded every update.

        An update's loss is the sum over ranks; gradient norm and outcome are the same on every rank.
        """
        whole = TrainMetrics()
        whole._sums = {
            name: sum(part._sums.get(name, 0.0) for part in parts)
            for name in {name: None for part in parts for name in part._sums}
        }
        whole._tokens = sum(part._tokens for part in parts)
        whole._losses = [sum(losses) for losses in zip(*(part._losses for part in parts), strict=True)]
        whole._grad_norms = list(parts[0]._grad_norms)
        whole._skipped = parts[0]._skipped
        return whole

    def values(self) -> dict[str, float]:
        """All values by metric name."""
        tokens, updates = max(self._tokens, 1), max(len(self._losses), 1)
        return {
            "train/loss": sum(self._losses) / updates,
            "train/grad_norm": sum(self._grad_norms) / updates,
            **{f"train/{name}": total / tokens for name, total in self._sums.items()},
            "train/tokens": float(self._tokens),
            "train/skipped_updates": float(self._skipped),
            "train/nonfinite_updates": float(sum(not math.isfinite(norm) for norm in self._grad_norms)),
        }
