"""REINFORCE++ (arXiv 2501.03262, section 3): token-level KL in the reward, normalised over the whole batch.

::

    L = -1/N sum_i 1/|o_i| sum_t min(r A_t, clip(r, 1 - e, 1 + e) A_t)
    A_t = raw - beta sum of k1 from t on, then (A_t - mean) / std over all tokens of the batch

The members of a group are not compared, so a group may have one member.
"""

from __future__ import annotations

from staleflow.training.advantages import returns_to_go
from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.losses import clipped_surrogate, per_sequence_scale

REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    advantages=returns_to_go,
    token_loss=clipped_surrogate,
    token_scale=per_sequence_scale,
)
