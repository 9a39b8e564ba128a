"""Off-policy corrections: what the ratio in the clip is taken to, and the weight beside it.

Three distributions meet at each token: theta, under training; prox, the weights at the start of the step;
and behaviour, which sampled the token, up to the staleness bound older than prox. All log-probs are in nats
at the sampling temperature, shape (rows, length).

Invariant: gradients flow through theta alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """The two factors of a token's loss; both of shape (rows, length)."""

    log_ratio: Tensor
    """Its exponential goes into the clip."""
    weight: Tensor
    """Multiplies the clipped loss; carries no gradient."""


Correction = Callable[[Tensor, Tensor, Tensor, float], Corrected]
"""(log theta, log prox, log behaviour, cap) -> factors."""


def truncated_importance_sampling(theta: Tensor, prox: Tensor, behaviour: Tensor, cap: float) -> Corrected:
    """Clip theta / prox; weigh by min(prox / behaviour, cap). The decoupled PPO objective, truncated."""
    weight = (prox - behaviour).exp().clamp(max=cap)
    return Corrected(log_ratio=theta - prox.detach(), weight=weight.detach())


def behaviour_ratio(theta: Tensor, prox: Tensor, behaviour: Tensor, cap: float) -> Corrected:
    """Clip theta / behaviour, with no further weight: the lag itself uses up the clip range."""
    return Corrected(log_ratio=theta - behaviour.detach(), weight=torch.ones_like(behaviour))


def uncorrected(theta: Tensor, prox: Tensor, behaviour: Tensor, cap: float) -> Corrected:
    """Clip theta / prox, behaviour ignored: right only where prox is what sampled the tokens."""
    return Corrected(log_ratio=theta - prox.detach(), weight=torch.ones_like(behaviour))


CORRECTIONS: Mapping[str, Correction] = {
    "tis": truncated_importance_sampling,
    "behaviour": behaviour_ratio,
    "none": uncorrected,
}
