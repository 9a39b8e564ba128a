"""Estimators of KL(theta || reference) from the log-probs of a token that theta sampled.

With `log r = log reference - log theta`, all in nats (John Schulman, "Approximating KL Divergence", 2020,
http://joschu.net/blog/kl-approx.html):

- k1 = -log r: unbiased, of either sign, large variance;
- k2 = (log r)^2 / 2: biased, never negative, small variance near the reference;
- k3 = r - 1 - log r: unbiased, never negative, small variance (GRPO's, arXiv 2402.03300, equation 4).

These properties hold for their values. As a loss term, on data that theta sampled, only k2 has the gradient
of this KL; k3 has the gradient of another KL, which is close while theta is near the reference; the gradient
of k1 is zero on average, so k1 is refused in the loss. In the reward no gradient passes through the estimate,
and k1 leaves the optimum unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from staleflow.training.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """The penalty on the policy's distance from the reference model."""

    coefficient: float = 0.0
    """Weight of the KL, per token and nat; 0: no reference model."""
    estimator: str = "k3"
    """A name in ESTIMATORS."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward of each token."""

    @property
    def in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether it is subtracted from the reward."""
        return self.coefficient > 0 and self.place == "reward"

    def __call__(self, theta: Tensor, reference: Tensor) -> Tensor:
        """`coefficient * estimate` of each token."""
        return self.coefficient * ESTIMATORS[self.estimator](theta, reference)


def k1(theta: Tensor, reference: Tensor) -> Tensor:
    """`log theta - log reference`."""
    return theta - reference


def k2(theta: Tensor, reference: Tensor) -> Tensor:
    """`(log theta - log reference)^2 / 2`."""
    return (theta - reference).square() / 2


def k3(theta: Tensor, reference: Tensor) -> Tensor:
    """`r - 1 - log r` with `r = reference / theta`."""
    log_r = (reference - theta).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_r.exp() - 1 - log_r


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
