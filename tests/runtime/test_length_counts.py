"""Length distributions of what was sampled and what was trained on."""

from __future__ import annotations

import numpy as np
import pytest

from staleflow.data.trajectory import (
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    Segment,
    TrainBatch,
    Trajectory,
)
from staleflow.runtime.length_counts import LengthCounts, bucket


def trajectory(
    tokens: int, *, prompt: int = 3, reason: FinishReason | None = FinishReason.STOP
) -> Trajectory:
    segment = Segment(
        generated=True,
        tokens=np.zeros(tokens, dtype=np.int32),
        log_probs=np.zeros(tokens, dtype=np.float32),
        versions=np.zeros(tokens, dtype=np.int32),
    )
    return Trajectory(
        trajectory_id="t",
        group_id="g",
        member=0,
        prompt=Prompt(prompt_id="0", tokens=(1,) * prompt, text="", answer=None),
        max_new_tokens=20,
        segments=(segment,) if tokens else (),
        finish_reason=reason,
    )


def batch(*members: Trajectory) -> TrainBatch:
    scored = tuple(ScoredTrajectory(trajectory=t, reward=Reward(raw=1.0)) for t in members)
    return TrainBatch(step=0, groups=(scored,))


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (1023, 512)]
)
def test_buckets_are_powers_of_two(length: int, expected: int) -> None:
    assert bucket(length) == expected


def test_dropping_the_long_one_shows_as_a_difference_of_the_two_distributions() -> None:
    counts = LengthCounts(longest=20)
    short, middle, long = trajectory(1), trajectory(6), trajectory(17, reason=None)
    counts.sampled(short)
    counts.sampled(middle)
    counts.sampled(long, cut=True)
    counts.sampled(trajectory(0, reason=None), cut=True)  # never started: not sampled
    counts.trained(batch(short, middle, trajectory(5, reason=FinishReason.FAILED)))
    assert counts.take() == {
        "lengths/cut": 1,
        **{f"lengths/sampled/{b}": int(b in (1, 4, 16)) for b in (1, 2, 4, 8, 16)},
        "lengths/sampled/mean": 8.0,
        **{f"lengths/trained/{b}": int(b in (1, 4)) for b in (1, 2, 4, 8, 16)},
        "lengths/trained/mean": 3.5,
    }


def test_a_row_has_the_same_names_whatever_happened_and_the_total_goes_on() -> None:
    counts = LengthCounts(longest=20)
    counts.sampled(trajectory(6, prompt=5))
    first = counts.take()
    second = counts.take()
    assert set(first) == set(second)
    assert set(second.values()) == {0}
    counts.sampled(trajectory(4, prompt=9))
    total = counts.totals()
    assert total["lengths/sampled/4"] == 2
    assert total["lengths/sampled/mean"] == 5.0
    assert (total["prompt_lengths/sampled/4"], total["prompt_lengths/sampled/8"]) == (1, 1)
    assert total["prompt_lengths/sampled/mean"] == 7.0
