"""DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, soft overlong punishment.

::

    L = -1/(sum_i |o_i|) sum_i sum_t min(r A_i, clip(r, 1 - e_low, 1 + e_high) A_i)
    A_i = (R_i + overlong penalty - mean(R)) / std(R) over the group

Mean and deviation are over rewards before the penalty, so that a long answer does not affect other members.
Dynamic sampling happens before a group reaches the trainer: `training.filtering.is_uninformative`.
"""

from __future__ import annotations

from staleflow.training.advantages import group_estimator, group_normalised
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_token_scale

DAPO = Algorithm(
    name="dapo",
    advantages=group_estimator(group_normalised),
    token_loss=clipped_surrogate,
    token_scale=per_token_scale,
)
