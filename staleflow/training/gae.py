"""Advantages with a critic: generalized advantage estimation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from staleflow.training.advantages import over_batch
from staleflow.training.outcomes import Discount, Estimate, Group, MemberOutcome


def generalized_advantages(groups: Sequence[Group], discount: Discount) -> list[list[Estimate]]:
    """GAE (arXiv 1506.02438, equation 16), then `(A_t - mean) / std` over the batch's tokens.

    ::

        delta_t = r_t + gamma * V_(t+1) - V_t
        A_t     = delta_t + gamma * lambda * A_(t+1)
        return  = A_t + V_t                        before normalising: the critic's target

    r_t is the KL penalty of token t, plus the score at the last token. V after the last token is 0, also for
    a response that ran out of budget: it gets no further reward. The papers do not normalise, but most
    implementations of PPO do; it makes the step independent of the reward's scale.
    """
    raw = [[_advantages(member, discount) for member in group] for group in groups]
    return [
        [
            Estimate(
                advantages=normal.astype(np.float32),
                returns=(own + _values(member)).astype(np.float32),
            )
            for member, own, normal in zip(group, unscaled, scaled, strict=True)
        ]
        for group, unscaled, scaled in zip(groups, raw, over_batch(raw), strict=True)
    ]


def _advantages(member: MemberOutcome, discount: Discount) -> NDArray[np.float64]:
    rewards = member.token_rewards.astype(np.float64)
    advantages = np.zeros(member.tokens)
    if member.tokens:
        rewards[-1] += member.raw + member.shaping
    values = np.append(_values(member), 0.0)
    following = 0.0
    for t in reversed(range(member.tokens)):
        delta = rewards[t] + discount.gamma * values[t + 1] - values[t]
        following = advantages[t] = delta + discount.gamma * discount.gae_lambda * following
    return advantages


def _values(member: MemberOutcome) -> NDArray[np.float64]:
    if member.values is None:
        raise ValueError("generalized advantages need the critic's values")
    return member.values.astype(np.float64)
