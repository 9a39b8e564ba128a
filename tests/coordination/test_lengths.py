"""What is expected of lengths, by hand."""

from __future__ import annotations

from staleflow.coordination.lengths import LengthStatistics


def test_before_anything_has_finished_the_guess_holds() -> None:
    lengths = LengthStatistics(100)
    assert (lengths.expected_growth, lengths.expected_held) == (100, 50)
    lengths.drawn(7)
    assert lengths.expected_held == 57


def test_the_sixteen_of_the_guess_and_the_sixteen_seen_weigh_about_the_same() -> None:
    lengths = LengthStatistics(100)
    for _ in range(16):
        lengths.finished(50)
    assert lengths.expected_growth == 75


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
    assert (lengths.expected_growth, lengths.expected_held) == (400, 200)
