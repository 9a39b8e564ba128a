"""What an algorithm is: an advantage per member, a loss per token, a scale per token, and its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from staleflow.data.trajectory import FloatArray, ScoredTrajectory
from staleflow.training.losses import ClipRange, TokenLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What reward shaping needs to know."""

    max_new_tokens: int
    """Token budget of a response."""
    overlong_buffer: int = 0
    """Last tokens of the budget over which the penalty grows; 0 turns it off."""
    overlong_penalty: float = 1.0
    """Reward taken from a response that uses its whole budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One value per algorithm, in a file of its own; see `dapo.py`."""

    name: str
    advantages: Callable[[Sequence[ScoredTrajectory], Shaping], FloatArray]
    """Group -> one finite advantage per member, shape (members,); 0 for members that are not usable."""
    token_loss: Callable[[Tensor, Tensor, Tensor, ClipRange], TokenLoss]
    """(log ratio, advantages, mask, clip range), each (rows, length) -> loss per token, before its weight.

    Whole rows, so that a loss over sequence-level ratios fits too."""
    token_scale: Callable[[NDArray[np.int64], int], NDArray[np.float64]]
    """(loss tokens of each trajectory of the optimizer batch, max_new_tokens) -> factor per trajectory."""
    defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    """Values for keys of the config's `training` section that the algorithm's paper uses."""
