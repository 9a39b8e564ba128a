"""REINFORCE++ with baseline (arXiv 2501.03262, section 3): minus the group's mean, normalised over the batch.

::

    L = -1/N sum_i 1/|o_i| sum_t [ min(r A_i, clip(r, 1 - e, 1 + e) A_i) - beta k2(theta, reference) ]
    A_i = R_i - mean(R) over the group, then (A_i - mean) / std over all tokens of the batch
"""

from __future__ import annotations

from staleflow.training.advantages import group_baseline
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_sequence_scale

REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline",
    advantages=group_baseline,
    token_loss=clipped_surrogate,
    token_scale=per_sequence_scale,
)
