"""torch's AdamW with the two checks that DeepSpeed makes for its own optimizers but not for this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class GuardedAdamW(torch.optim.AdamW):
    """Clips gradients to a norm, and skips the update if the norm is not finite.

    DeepSpeed reads `overflow` and `_global_grad_norm` after a step.
    """

    def __init__(self, parameters: Iterable[Tensor], *, max_grad_norm: float, **options: Any) -> None:
        """`max_grad_norm` 0: gradients are not scaled down."""
        super().__init__(parameters, **options)
        self._max_grad_norm = max_grad_norm or math.inf
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, unless a gradient is not finite."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._global_grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
        self.overflow = not math.isfinite(self._global_grad_norm)
        return None if self.overflow else super().step(closure)
