"""GSPO (arXiv 2507.18071, equation 5): GRPO's advantages with the ratio of the whole response.

::

    L = -1/N sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i)
    s_i = (pi_theta(o_i) / pi_old(o_i)) ^ (1 / |o_i|),   A_i = (R_i - mean(R)) / std(R) over the group

If tokens have their own weights (`tis`, `icepop`), each scales its token's part of the gradient of s_i:
GSPO-token, section 4.3.

The mean over a response is much closer to 1 than a token's ratio, so the clip range is of the order 1e-4.
"""

from __future__ import annotations

from staleflow.training.advantages import group_estimator, group_normalised
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import per_sequence_scale, sequence_surrogate

GSPO = Algorithm(
    name="gspo",
    advantages=group_estimator(group_normalised),
    token_loss=sequence_surrogate,
    token_scale=per_sequence_scale,
)
