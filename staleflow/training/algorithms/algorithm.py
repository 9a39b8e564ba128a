"""The definition of an algorithm: an advantage per token, a loss per token, and a scale per trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staleflow.training.losses import ClipRange, PolicyTerms, TokenLoss
from staleflow.training.outcomes import Estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One value per algorithm, each in its own file; see `dapo.py`. Picklable, so no lambdas.

    Its parameters (clip range, KL) are in the config, with defaults per algorithm:
    `staleflow.config.algorithms`.
    """

    name: str
    advantages: Estimator
    token_loss: Callable[[PolicyTerms, ClipRange], TokenLoss]
    """Loss per token before its weight; gets whole rows, so that a ratio may be per sequence."""
    token_scale: Callable[[NDArray[np.int64], int], NDArray[np.float64]]
    """(loss tokens of each trajectory of the optimizer batch, max_new_tokens) -> factor per trajectory."""
    critic: bool = False
    """Whether the advantages need a critic's values."""
