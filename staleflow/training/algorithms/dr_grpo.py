"""Dr.GRPO ("GRPO done right", arXiv 2503.20783, section 3.2): GRPO without its two biases.

::

    L = -1/(N max_new_tokens) sum_i sum_t min(r A_i, clip(r, 1 - e, 1 + e) A_i)
    A_i = R_i - mean(R) over the group
"""

from __future__ import annotations

from staleflow.training.advantages import group_centred, group_estimator
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_budget_scale

DR_GRPO = Algorithm(
    name="dr_grpo",
    advantages=group_estimator(group_centred),
    token_loss=clipped_surrogate,
    token_scale=per_budget_scale,
)
