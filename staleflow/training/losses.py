"""Losses per token, and the scale that turns their sum into the loss of an optimizer batch.

Invariant: the scale of a token is computed from the whole optimizer batch before the first micro-batch runs,
so the loss and its gradient are sums over tokens and do not depend on how micro-batches are cut.

Tensors have shape (rows, length), with a whole trajectory in each row; entry t refers to token t, and entries
outside `mask` are meaningless. Ratios are theta / old, where the correction defines old.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: far outside any clip range, and the exponential is finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """The inputs of a policy loss."""

    log_ratio: Tensor
    """log theta - log old; carries the gradient."""
    theta: Tensor
    """Log-probs under the weights being trained; carries the gradient."""
    advantages: Tensor
    mask: Tensor
    """Tokens in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The result of a policy loss; both of shape (rows, length)."""

    loss: Tensor
    """To be minimised; carries the gradient."""
    clipped: Tensor
    """True where the clip was active."""


def clipped_surrogate(terms: PolicyTerms, clip: ClipRange) -> TokenLoss:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)`: no gradient where the clip is active.

    PPO (arXiv 1707.06347, equation 7), with separate bounds as in DAPO's "clip-higher" (arXiv 2503.14476,
    section 3.1).
    """
    ratio = _exponential(terms.log_ratio)
    free = ratio * terms.advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * terms.advantages
    return TokenLoss(loss=-torch.minimum(free, bounded), clipped=(bounded < free) & terms.mask)


def sequence_surrogate(terms: PolicyTerms, clip: ClipRange) -> TokenLoss:
    """The clipped surrogate with the ratio of the whole response, `s = exp(mean of log r over its tokens)`.

    GSPO (arXiv 2507.18071, equations 5 to 7), as GSPO-token (its section 4.3): each token has the value of
    its sequence's term and its own part of the term's gradient. With `per_sequence_scale` the sum over a row
    is the term once, in value and gradient; a token's weight scales only that token's part of the gradient.
    """
    tokens = terms.mask.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = torch.where(terms.mask, terms.log_ratio, 0.0).sum(dim=-1, keepdim=True) / tokens
    whole = PolicyTerms(
        log_ratio=mean.detach() + (terms.log_ratio - terms.log_ratio.detach()),
        theta=terms.theta,
        advantages=terms.advantages,
        mask=terms.mask,
    )
    return clipped_surrogate(whole, clip)


def weighted_log_likelihood(terms: PolicyTerms, clip: ClipRange) -> TokenLoss:
    """`-sg(clip(r, 1 - low, 1 + high)) A log theta`: truncates the weight; every token keeps its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5); sg stops the gradient.
    """
    ratio = _exponential(terms.log_ratio).detach()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return TokenLoss(loss=-weight * terms.advantages * terms.theta, clipped=(weight != ratio) & terms.mask)


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> TokenLoss:
    """`max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`, as in PPO's first implementation.

    `before`: values at the step's start; `clip` 0 turns the clip off.
    """
    free = (values - returns).square() / 2
    if clip <= 0:
        return TokenLoss(loss=free, clipped=torch.zeros_like(free, dtype=torch.bool))
    held = before + (values - before).clamp(-clip, clip)
    bounded = (held - returns).square() / 2
    return TokenLoss(loss=torch.maximum(free, bounded), clipped=bounded > free)


def _exponential(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# Scales: (loss tokens of each trajectory of the optimizer batch, shape (trajectories,), max_new_tokens)
# -> factor for each token of that trajectory, same shape. None divides by zero.


def per_token_scale(loss_tokens: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
    """Equal weight for every token of the optimizer batch: 1 / tokens in the loss (DAPO, section 3.3)."""
    return np.full(len(loss_tokens), 1.0 / max(int(loss_tokens.sum()), 1))


def per_sequence_scale(loss_tokens: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
    """The mean over trajectories of the mean over their tokens: 1 / (N |o_i|) (GRPO, equation 3).

    N counts trajectories with a token in the loss.
    """
    return 1.0 / (_trained(loss_tokens) * np.maximum(loss_tokens, 1))


def per_trajectory_scale(loss_tokens: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
    """The mean over trajectories of the sum over their tokens: 1 / N.

    With a ratio of 1 this is the gradient of the log-prob of the whole response, RLOO's single action.
    """
    return np.full(len(loss_tokens), 1.0 / _trained(loss_tokens))


def per_budget_scale(loss_tokens: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
    """1 / (N max_new_tokens): a constant instead of the length (Dr.GRPO, arXiv 2503.20783, listing 1).

    Division by the length would penalise longer wrong answers less.
    """
    return np.full(len(loss_tokens), 1.0 / (_trained(loss_tokens) * max(max_new_tokens, 1)))


def _trained(loss_tokens: NDArray[np.int64]) -> int:
    return max(int((loss_tokens > 0).sum()), 1)
