"""Scripted response lengths for the fake engine.

Invariant: a length is a function of the trajectory (its id, and the turn it is in) and never of the
instance, the batch or the moment, so that an interrupted trajectory ends where it would have ended.

A `Lengths` says how many tokens the trajectory generates in its present turn, the closing stop token
included: turn 0 begins with the response, and each given segment (a tool's output, say) begins another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from staleflow.data.trajectory import Trajectory
from staleflow.rollout.randomness import trajectory_key, uniform

Lengths = Callable[[Trajectory], int]
"""Tokens generated in the present turn, at least 1; asked with the trajectory as it was added."""


def fixed(tokens: int) -> Lengths:
    """Every turn takes `tokens` tokens."""
    return lambda trajectory: tokens


def evenly(low: int, high: int, *, seed: int) -> Lengths:
    """Uniform over the integers from `low` to `high`, both included."""
    return lambda trajectory: low + int(_draw(trajectory, seed) * (high - low + 1))


def long_tailed(median: float, sigma: float, most: int, *, seed: int) -> Lengths:
    """Lognormal with the given median and log-space deviation `sigma`, cut to 1 and `most`."""

    def length(trajectory: Trajectory) -> int:
        # The middle of a 2**-53 cell, since the quantile of 0 is infinite.
        normal = NormalDist().inv_cdf(_draw(trajectory, seed) + 2.0**-54)
        return max(1, min(most, round(median * math.exp(sigma * normal))))

    return length


def turn_start(trajectory: Trajectory) -> int:
    """Response position at which the present turn began: after the last given segment."""
    generated_last = bool(trajectory.segments) and trajectory.segments[-1].generated
    return trajectory.response_len - (len(trajectory.segments[-1].tokens) if generated_last else 0)


def _draw(trajectory: Trajectory, seed: int) -> float:
    turn = sum(not segment.generated for segment in trajectory.segments)
    return uniform(trajectory_key(seed, f"length\x00{trajectory.trajectory_id}"), turn)
