"""Lengths of simulated responses.

Invariant: a length is a function of (seed, prompt, trajectory id) alone, so policies are compared on the same
work, and an interrupted trajectory ends where it would have ended undisturbed.

A `Lengths` is called once for each group, when it is drawn, and for each trajectory sampled anew.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

Lengths = Callable[[str, Sequence[str]], list[int]]
"""(prompt, trajectory ids of one of its groups) -> response tokens of each, at least 1."""

_NORMAL = NormalDist()


def fixed(tokens: int) -> Lengths:
    """Every response has `tokens` tokens."""
    return lambda prompt, members: [tokens] * len(members)


def evenly(low: int, high: int, *, seed: int) -> Lengths:
    """Uniform over the integers from `low` to `high`, both included."""

    def lengths(prompt: str, members: Sequence[str]) -> list[int]:
        return [low + int(_uniform(seed, m) * (high - low + 1)) for m in members]

    return lengths


def lognormal(
    *, median: float, sigma: float, most: int, correlation: float = 0.0, truncated: float = 0.0, seed: int
) -> Lengths:
    """Lognormal, cut at `most` tokens (`max_new_tokens`).

    `sigma` is the deviation of the logarithm. `correlation`, 0 to 1, is the share of its variance common to
    the members of a group, since hard prompts get long answers. `truncated` is the share of responses that
    never end by themselves and run to `most`, in addition to those that the tail brings there.
    """
    _check_share("correlation", correlation)
    _check_share("truncated", truncated)
    common, own = math.sqrt(correlation), math.sqrt(1.0 - correlation)

    def lengths(prompt: str, members: Sequence[str]) -> list[int]:
        group = common * _normal(_uniform(seed, prompt)) if common else 0.0
        result = []
        for member in members:
            first, second = _uniforms(seed, member)
            if second < truncated:
                result.append(most)
            else:
                tokens = median * math.exp(sigma * (group + own * _normal(first)))
                result.append(max(1, min(most, round(tokens))))
        return result

    return lengths


def bimodal(
    *, short: float, long: float, long_share: float, sigma: float = 0.25, most: int, seed: int
) -> Lengths:
    """Two lognormal modes with medians `short` and `long`; `long_share` is the probability that a whole group
    is long."""
    _check_share("long_share", long_share)

    def lengths(prompt: str, members: Sequence[str]) -> list[int]:
        median = long if _uniform(seed, prompt) < long_share else short
        tokens = [median * math.exp(sigma * _normal(_uniform(seed, m))) for m in members]
        return [max(1, min(most, round(t))) for t in tokens]

    return lengths


def replay(recorded: Sequence[Sequence[int]], *, seed: int) -> Lengths:
    """Recorded groups of response lengths; each prompt gets one of them.

    A group with more members than its record starts again at the record's beginning.
    """
    if not recorded or not all(recorded):
        raise ValueError("replay needs at least one group, and no empty one")

    def lengths(prompt: str, members: Sequence[str]) -> list[int]:
        group = recorded[int(_uniform(seed, prompt) * len(recorded))]
        return [group[k % len(group)] for k in range(len(members))]

    return lengths


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be from 0 to 1, not {value}")


def _normal(uniform: float) -> float:
    return _NORMAL.inv_cdf(uniform)


def _uniform(seed: int, identity: str) -> float:
    return _uniforms(seed, identity)[0]


def _uniforms(seed: int, identity: str) -> tuple[float, float]:
    """Two independent numbers in (0, 1): the middles of 2**-52 cells, since the quantile of 0 is infinite."""
    digest = hashlib.blake2b(f"{seed}\x00length\x00{identity}".encode(), digest_size=16).digest()
    first, second = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return ((first >> 12) + 0.5) * 2.0**-52, ((second >> 12) + 0.5) * 2.0**-52
