"""What is expected of lengths, by hand."""

from __future__ import annotations

import pytest

from staleflow.coordination.estimates import TOLERANCE, LengthStatistics


def test_before_anything_has_finished_the_guess_holds() -> None:
    lengths = LengthStatistics(100)
    assert (lengths.expected_growth, lengths.expected_held) == (100, 50)
    lengths.drawn(7)
    assert lengths.expected_held == 57


def test_the_sixteen_of_the_guess_and_the_sixteen_seen_weigh_about_the_same() -> None:
    lengths = LengthStatistics(100)
    for _ in range(16):
        lengths.finished(50)
    assert lengths.expected_growth == pytest.approx(75, rel=TOLERANCE)


def test_a_running_trajectory_is_a_long_one_half_way() -> None:
    """Half take 10 tokens, half 90: E[L²] / 2 E[L] = 4100 / 100 = 41, though the mean is 50."""
    lengths = LengthStatistics(50)
    for _ in range(5000):
        lengths.finished(10)
        lengths.finished(90)
    assert abs(lengths.expected_growth - 50) <= 1
    assert abs(lengths.expected_held - 41) <= 1


def test_a_wrong_guess_is_forgotten_and_so_are_the_lengths_of_an_earlier_model() -> None:
    lengths = LengthStatistics(100_000)
    for _ in range(16_000):
        lengths.finished(20)
    assert lengths.expected_growth == 20
    assert lengths.expected_held <= 12
    for _ in range(16_000):
        lengths.finished(400)
    assert lengths.expected_growth == pytest.approx(400, rel=TOLERANCE)
    assert lengths.expected_held == pytest.approx(200, rel=TOLERANCE)


def test_what_is_told_stays_while_it_is_about_right() -> None:
    lengths = LengthStatistics(1000)
    told = []
    for _ in range(200):
        lengths.finished(900)
        lengths.finished(1100)
        told.append(lengths.expected_growth)
    assert set(told) == {1000}
    for _ in range(40):
        lengths.finished(2000)
        told.append(lengths.expected_growth)
    assert told[-1] > 1000
    assert len(set(told)) < 10
