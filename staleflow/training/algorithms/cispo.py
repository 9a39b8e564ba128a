"""CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the weight is clipped, not the update.

::

    L = -1/(sum_i |o_i|) sum_i sum_t sg(clip(r, 1 - e_low, 1 + e_high)) A_i log theta
    A_i = (R_i - mean(R)) / std(R) over the group

With `correction: behaviour`, r is theta / behaviour and the clip truncates the importance weight. With `tis`
its cap truncates the lag, and the clip acts from the second minibatch on.
"""

from __future__ import annotations

from staleflow.training.advantages import group_estimator, group_normalised
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import per_token_scale, weighted_log_likelihood

CISPO = Algorithm(
    name="cispo",
    advantages=group_estimator(group_normalised),
    token_loss=weighted_log_likelihood,
    token_scale=per_token_scale,
)
