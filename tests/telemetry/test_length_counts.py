"""Length distributions of what was sampled and what was trained on."""

from __future__ import annotations

import numpy as np
import pytest

from staleflow.coordination.actions import Abort
from staleflow.data.trajectory import (
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    Segment,
    Trajectory,
)
from staleflow.runtime.length_counts import Late, LengthCounts, bucket


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


def batch(*members: Trajectory) -> list[list[ScoredTrajectory]]:
    return [[ScoredTrajectory(trajectory=t, reward=Reward(raw=1.0)) for t in members]]


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


ABORT = Abort(instance="i0", incarnation=1, seq=7, trajectory_id="t")


def test_an_aborted_one_is_counted_with_the_tokens_that_come_after_it_was_dropped() -> None:
    counts = LengthCounts(longest=20)
    counts.aborted(ABORT)
    counts.dropped(trajectory(3, reason=None), counts=True)
    counts.acknowledged("i0", 6)
    counts.late([Late("t", 6, finished=False)])
    counts.acknowledged("i1", 7)
    assert counts.take()["lengths/sampled/mean"] == 0.0
    counts.acknowledged("i0", 7)
    assert counts.totals()["lengths/sampled/8"] == counts.totals()["lengths/cut"] == 1
    assert counts.totals()["lengths/sampled/mean"] == 9.0


def test_one_that_finished_before_its_abort_came_was_not_cut() -> None:
    counts = LengthCounts(longest=20)
    counts.aborted(ABORT)
    counts.dropped(trajectory(0, reason=None), counts=True)
    counts.late([Late("t", 5, finished=True)])
    counts.acknowledged("i0", 7)
    assert (counts.totals()["lengths/cut"], counts.totals()["lengths/sampled/mean"]) == (0, 5.0)


def test_of_a_lost_instance_and_at_the_end_what_is_known_is_counted() -> None:
    counts = LengthCounts(longest=20)
    counts.aborted(ABORT)
    counts.dropped(trajectory(4, reason=None), counts=True)
    counts.acknowledged("i0")
    assert counts.take()["lengths/cut"] == 1
    counts.aborted(ABORT)
    counts.dropped(trajectory(4, reason=None), counts=True)
    assert counts.totals()["lengths/cut"] == 2


def test_what_the_end_of_the_run_drops_is_not_counted() -> None:
    counts = LengthCounts(longest=20)
    counts.aborted(ABORT)
    counts.dropped(trajectory(4, reason=None), counts=False)
    counts.dropped(trajectory(4, reason=None), counts=False)
    counts.acknowledged("i0", 7)
    assert counts.totals()["lengths/sampled/mean"] == 0.0


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
