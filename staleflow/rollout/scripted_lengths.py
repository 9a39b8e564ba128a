"""Scripted response lengths for the fake engine.

Invariant: a length depends only on the trajectory (its id and its turn), never on the instance, the batch or
the time, so an interrupted trajectory ends where it would have ended undisturbed.

A `Lengths` returns the number of tokens that the trajectory generates in its current turn, including the
closing stop token. Turn 0 begins with the response; each given segment (for example a tool's output) begins
another turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from staleflow.data.trajectory import Trajectory
from staleflow.rollout.randomness import trajectory_key, uniform

Lengths = Callable[[Trajectory], int]
"""Tokens generated in the current turn, at least 1; called with the trajectory as it was added."""


def fixed(tokens: int) -> Lengths:
    """Every turn has `tokens` tokens."""
    return lambda trajectory: tokens


def evenly(low: int, high: int, *, seed: int) -> Lengths:
    """Uniform over the integers from `low` to `high`, both included."""
    return lambda trajectory: low + int(_draw(trajectory, seed) * (high - low + 1))


def long_tailed(median: float, sigma: float, most: int, *, seed: int) -> Lengths:
    """Lognormal with the given median and log-space deviation `sigma`, clipped to [1, `most`]."""

    def length(trajectory: Trajectory) -> int:
        # Use the middle of a 2**-53 cell: the quantile of 0 is infinite.
        normal = NormalDist().inv_cdf(_draw(trajectory, seed) + 2.0**-54)
        return max(1, min(most, round(median * math.exp(sigma * normal))))

    return length


def turn_start(trajectory: Trajectory) -> int:
    """Response position at which the current turn began: after the last given segment."""
    generated_last = bool(trajectory.segments) and trajectory.segments[-1].generated
    return trajectory.response_len - (len(trajectory.segments[-1].tokens) if generated_last else 0)


def _draw(trajectory: Trajectory, seed: int) -> float:
    turn = sum(not segment.generated for segment in trajectory.segments)
    return uniform(trajectory_key(seed, f"length\x00{trajectory.trajectory_id}"), turn)
