"""Off-policy corrections: the ratio in the clip, and the importance weight of each token.

Each token has three distributions: theta, being trained; prox, the weights at the start of the step; and
behaviour, which sampled the token, older than prox by up to the staleness bound. All log-probs are in nats
at the sampling temperature, shape (rows, length), a whole trajectory in each row.

Invariants: gradients flow through theta alone; every weight is finite and at least 0; a token with weight 0
still counts in the scale of the loss, so that masking makes steps smaller, never noisier.

The clip acts on theta / prox in all corrections but `behaviour`. With one update per step theta = prox: the
ratio is 1 and only the weight corrects. The clip starts to act with the second minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from staleflow.training.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on prox / behaviour."""

    cap: float = 2.0
    """Largest weight of tis, sequence_tis and sequence_mask."""
    token_band: tuple[float, float] = (0.5, 5.0)
    """icepop: a token outside has weight 0."""
    sequence_band: tuple[float, float] = (0.8, 1.25)
    """sequence_mask: a trajectory whose mean ratio lies outside has weight 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """The two factors of a token's loss; both of shape (rows, length)."""

    log_ratio: Tensor
    """Logarithm of the ratio that is clipped."""
    weight: Tensor
    """Multiplies the clipped loss; without gradient."""


Correction = Callable[[Tensor, Tensor, Tensor, Tensor, Limits], Corrected]
"""(log theta, log prox, log behaviour, mask of the loss, limits) -> factors."""


def token_tis(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """Weight `min(prox / behaviour, cap)` for each token.

    Truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025, https://fengyao.notion.site/off-policy-rl). This is decoupled PPO, truncated.
    """
    return _weighed(theta, prox, (prox - behaviour).exp().clamp(max=limits.cap))


def sequence_tis(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """Weight `min(product of prox / behaviour over the response, cap)`, one for all its tokens.

    Liu et al., "When Speed Kills Stability", 2025, https://richardli.xyz/rl-collapse. Apart from the
    truncation it is unbiased for the whole response, unlike token ratios. Its variance grows with length:
    long responses tend to weights near 0 or the cap.
    """
    total = torch.where(mask, prox - behaviour, 0.0).sum(dim=-1, keepdim=True)
    return _weighed(theta, prox, _exponential(total).clamp(max=limits.cap).expand_as(prox))


def icepop(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """Weight `k = prox / behaviour` where low <= k <= high, else 0: masked instead of truncated.

    IcePop (Ring-1T, arXiv 2510.18855, section 3; low 0.5, high 5).
    """
    low, high = limits.token_band
    ratio = _exponential(prox - behaviour)
    return _weighed(theta, prox, torch.where((ratio >= low) & (ratio <= high), ratio, 0.0))


def decoupled(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """Weight `prox / behaviour`, not truncated: decoupled PPO.

    Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641); AReaL (arXiv
    2505.24298). There, too, prox is the weights at the step's start. `tis` is the same with a cap on the
    weight; the two agree where no weight reaches the cap.
    """
    return _weighed(theta, prox, _exponential(prox - behaviour))


def sequence_mask(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """`tis`, but weight 0 for a trajectory whose geometric mean of prox / behaviour lies outside the band.

    Geometric rejection with truncated token weights (Liu et al., "When Speed Kills Stability"). Unlike the
    product, the mean does not grow with length.
    """
    low, high = limits.sequence_band
    tokens = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = _exponential(torch.where(mask, prox - behaviour, 0.0).sum(dim=-1, keepdim=True) / tokens)
    truncated = (prox - behaviour).exp().clamp(max=limits.cap)
    return _weighed(theta, prox, torch.where((mean >= low) & (mean <= high), truncated, 0.0))


def behaviour_ratio(
    theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits
) -> Corrected:
    """Clip theta / behaviour, without a weight: the lag itself uses up the clip range.

    Original PPO (arXiv 1707.06347), where old is the behaviour policy.
    """
    return Corrected(log_ratio=theta - behaviour.detach(), weight=torch.ones_like(behaviour))


def uncorrected(theta: Tensor, prox: Tensor, behaviour: Tensor, mask: Tensor, limits: Limits) -> Corrected:
    """Clip theta / prox and ignore behaviour: correct only if prox sampled the tokens."""
    return Corrected(log_ratio=theta - prox.detach(), weight=torch.ones_like(behaviour))


def _weighed(theta: Tensor, prox: Tensor, weight: Tensor) -> Corrected:
    return Corrected(log_ratio=theta - prox.detach(), weight=weight.detach())


def _exponential(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


CORRECTIONS: Mapping[str, Correction] = {
    "tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "decoupled": decoupled,
    "sequence_mask": sequence_mask,
    "behaviour": behaviour_ratio,
    "none": uncorrected,
}
