"""GRPO (DeepSeekMath, arXiv 2402.03300, equation 3): rewards normalised within the group.

::

    L = -1/N sum_i 1/|o_i| sum_t [ min(r A_i, clip(r, 1 - e, 1 + e) A_i) - beta k3(theta, reference) ]
    A_i = (R_i - mean(R)) / std(R) over the group
"""

from __future__ import annotations

from staleflow.training.advantages import group_estimator, group_normalised
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_sequence_scale

GRPO = Algorithm(
    name="grpo",
    advantages=group_estimator(group_normalised),
    token_loss=clipped_surrogate,
    token_scale=per_sequence_scale,
)
