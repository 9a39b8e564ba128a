"""What an algorithm is: an advantage for each token, a loss per token, and a scale per trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.training.losses import ClipRange, PolicyTerms, TokenLoss
from staleflow.training.outcomes import Estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One value per algorithm, in a file of its own; see `dapo.py`. Picklable, so no lambdas.

    The values that go with it (clip range, KL) are settings of the config, with defaults of its own for each
    algorithm: `staleflow.config.algorithms`.
    """

    name: str
    advantages: Estimator
    token_loss: Callable[[PolicyTerms, ClipRange], TokenLoss]
    """Loss per token before its weight; over whole rows, so that a sequence-level ratio fits too."""
    token_scale: Callable[[NDArray[np.int64], int], NDArray[np.float64]]
    """(loss tokens of each trajectory of the optimizer batch, max_new_tokens) -> factor per trajectory."""
    critic: bool = False
    """Whether the advantages need a critic's values."""
