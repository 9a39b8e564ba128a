"""Policy losses per token, and the scale that turns their sum into the loss of an optimizer batch.

Invariant: the scale of a token is fixed from the whole optimizer batch before the first micro-batch is
run, so the loss and its gradient are sums over tokens, and do not depend on how micro-batches are cut.

Tensors are (rows, length), entry t about token t of the row; entries outside `mask` mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this: far outside any clip range, and its exponential is finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a policy loss returns; both of shape (rows, length)."""

    loss: Tensor
    """To be minimised; carries the gradient."""
    clipped: Tensor
    """True where the clip decided, and the gradient is therefore zero."""


def clip_higher(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: ClipRange) -> TokenLoss:
    """PPO's clipped surrogate with separate bounds (DAPO "clip-higher", arXiv 2503.14476, section 3.1)."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    return TokenLoss(loss=-torch.minimum(free, bounded), clipped=(bounded < free) & mask)


def per_token_scale(loss_tokens: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
    """Every token of the optimizer batch weighs the same: 1 / all tokens in the loss (DAPO, section 3.3).

    `loss_tokens`, shape (trajectories,), counts the tokens in the loss; so has the result, a factor for
    each token of that trajectory. All zero when there is no token.
    """
    return np.full(len(loss_tokens), 1.0 / max(int(loss_tokens.sum()), 1))
