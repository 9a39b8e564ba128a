"""Length models: functions of the seed and the ids, with the moments they promise."""

from __future__ import annotations

import math
from statistics import correlation, fmean, median, stdev

import pytest

from staleflow.simulation.response_lengths import Lengths, bimodal, evenly, fixed, lognormal, replay

GROUPS = [(f"e0-p{g}-a0", [f"e0-p{g}-a0-m{m}" for m in range(4)]) for g in range(1500)]


def drawn(lengths: Lengths) -> list[list[int]]:
    return [lengths(group, members) for group, members in GROUPS]


@pytest.mark.parametrize(
    "lengths",
    [
        fixed(7),
        evenly(3, 9, seed=1),
        lognormal(median=500, sigma=0.7, most=4000, correlation=0.3, truncated=0.05, seed=1),
        bimodal(short=100, long=1000, long_share=0.3, most=4000, seed=1),
        replay([[1, 2, 3], [9, 8]], seed=1),
    ],
)
def test_a_length_depends_on_seed_and_ids_only(lengths: Lengths) -> None:
    there, back = drawn(lengths), [lengths(g, m) for g, m in reversed(GROUPS)][::-1]
    assert there == back
    assert all(tokens >= 1 for group in there for tokens in group)


def test_lognormal_has_its_median_deviation_and_correlation() -> None:
    groups = drawn(lognormal(median=500, sigma=0.6, most=10**6, correlation=0.4, seed=2))
    tokens = [t for group in groups for t in group]
    assert median(tokens) == pytest.approx(500, rel=0.05)
    assert stdev(math.log(t) for t in tokens) == pytest.approx(0.6, rel=0.05)
    first, second = ([math.log(group[k]) for group in groups] for k in (0, 1))
    assert correlation(first, second) == pytest.approx(0.4, abs=0.07)


def test_the_truncation_spike_is_the_tail_and_those_that_never_end() -> None:
    groups = drawn(lognormal(median=500, sigma=0.6, most=1500, truncated=0.1, seed=3))
    tail = 0.5 * math.erfc(math.log(3) / 0.6 / math.sqrt(2))
    at_most = fmean(t == 1500 for group in groups for t in group)
    assert at_most == pytest.approx(0.1 + 0.9 * tail, abs=0.015)


def test_bimodal_groups_are_short_or_long_as_a_whole() -> None:
    groups = drawn(bimodal(short=100, long=10_000, long_share=0.25, most=20_000, seed=4))
    assert all(len({t > 1000 for t in group}) == 1 for group in groups)
    assert fmean(group[0] > 1000 for group in groups) == pytest.approx(0.25, abs=0.04)


def test_replay_takes_whole_groups_and_starts_again_for_more_members() -> None:
    groups = drawn(replay([[5, 6, 7, 8], [1, 2]], seed=5))
    assert {tuple(g) for g in groups} == {(5, 6, 7, 8), (1, 2, 1, 2)}
    with pytest.raises(ValueError, match="no empty one"):
        replay([[1], []], seed=0)


def test_shares_outside_0_to_1_are_refused() -> None:
    with pytest.raises(ValueError, match=r"correlation must be from 0 to 1, not 1\.5"):
        lognormal(median=1, sigma=1, most=9, correlation=1.5, seed=0)
