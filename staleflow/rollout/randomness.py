"""The random number of a token: a pure function of (run seed, trajectory id, token position).

Invariant: it depends on nothing else, neither on the instance, nor the batch, nor the order of arrival. So a
trajectory that is interrupted, moved and resumed draws the same numbers as an undisturbed one, and the
members of a group draw different numbers because their ids differ.

Mechanism: one hash per trajectory gives a 64-bit key; key and position go through splitmix64 (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), which numpy evaluates for a
whole batch at once.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def trajectory_key(seed: int, trajectory_id: str) -> int:
    """64-bit key of one trajectory in one run."""
    text = f"{seed}\x00{trajectory_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(keys: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits.

    `keys` (uint64) and `positions` (non-negative) broadcast against each other; the result has their shape.
    """
    counter = np.atleast_1d(np.asarray(positions)).astype(np.uint64) + np.uint64(1)
    # Arrays, not scalars: uint64 arrays wrap silently, as the algorithm needs; scalars warn.
    mixed = np.atleast_1d(np.asarray(keys, dtype=np.uint64)) + counter * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed = mixed ^ (mixed >> np.uint64(31))
    numbers: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def uniform(key: int, position: int) -> float:
    """`uniforms` for one token."""
    return float(uniforms(np.uint64(key), position)[0])
