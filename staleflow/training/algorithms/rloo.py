"""RLOO (arXiv 2402.14740): REINFORCE on whole responses, with the other members as baseline.

::

    L = -1/N sum_i sum_t min(r A_i, clip(r, 1 - e, 1 + e) A_i)
    A_i = R_i - mean(R_j, j != i) over the group

The paper has no ratio: it trains once on fresh data. With one update per step and r = theta / prox the ratio
is 1 and the gradient is the paper's, `-A_i grad log pi(o_i)`. The clip is for cases that the paper does not
cover: several minibatches, or `correction: behaviour`.
"""

from __future__ import annotations

from staleflow.training.advantages import group_estimator, leave_one_out
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_trajectory_scale

RLOO = Algorithm(
    name="rloo",
    advantages=group_estimator(leave_one_out),
    token_loss=clipped_surrogate,
    token_scale=per_trajectory_scale,
)
