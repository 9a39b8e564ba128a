"""PPO (arXiv 1707.06347, equation 7) with a critic and GAE (arXiv 1506.02438).

::

    L = -1/(sum_i |o_i|) sum_i sum_t min(r A_t, clip(r, 1 - e, 1 + e) A_t)
    A_t: `training.gae`; the critic learns A_t + V_t: `training.critic`

The members of a group are not compared, so a group may have one member.
"""

from __future__ import annotations

from staleflow.training.algorithms.algorithm import Algorithm
from staleflow.training.gae import generalized_advantages
from staleflow.training.losses import clipped_surrogate, per_token_scale

PPO = Algorithm(
    name="ppo",
    advantages=generalized_advantages,
    token_loss=clipped_surrogate,
    token_scale=per_token_scale,
    critic=True,
)
