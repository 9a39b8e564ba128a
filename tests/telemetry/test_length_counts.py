"""Length distributions of what was sampled and what was trained on."""

from __future__ import annotations

import pytest
from scripted_events import batch, received, report, response, scored, teller

from staleflow.coordination.actions import Abort
from staleflow.data.responses import LateTokens
from staleflow.data.trajectory import FinishReason
from staleflow.telemetry.events import (
    CommandSent,
    GenerationEnded,
    InstanceDown,
    Released,
    StragglerResampled,
    StragglerTruncated,
)
from staleflow.telemetry.length_counts import LengthCounts, bucket


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (1023, 512)]
)
def test_buckets_are_powers_of_two(length: int, expected: int) -> None:
    assert bucket(length) == expected


def test_dropping_the_long_one_shows_as_a_difference_of_the_two_distributions() -> None:
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    short, middle = response(1), response(6)
    long = response(17, id_="long", reason=FinishReason.LENGTH)
    tell(GenerationEnded(short))
    tell(GenerationEnded(middle))
    tell(StragglerTruncated(trajectory=long, reason="takes too long"))
    tell(GenerationEnded(long))
    tell(GenerationEnded(response(0, reason=FinishReason.FAILED)))  # never started: not sampled
    tell(batch([scored(short), scored(middle), scored(response(5, reason=FinishReason.FAILED))]))
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
    tell = teller(counts)
    tell(CommandSent(ABORT))
    tell(Released([response(3, reason=None)], "aborted"))
    tell(received(report("i0", acked_seq=6)))
    tell(received(report(acked_seq=6), late=[LateTokens("t", 6, finished=False)]))
    tell(received(report("i1", acked_seq=7)))
    assert counts.take()["lengths/sampled/mean"] == 0.0
    tell(received(report("i0", acked_seq=7)))
    assert counts.totals()["lengths/sampled/8"] == counts.totals()["lengths/cut"] == 1
    assert counts.totals()["lengths/sampled/mean"] == 9.0


def test_one_that_finished_before_its_abort_came_was_not_cut() -> None:
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    tell(CommandSent(ABORT))
    tell(Released([response(0, reason=None)], "aborted"))
    tell(received(report(acked_seq=6), late=[LateTokens("t", 5, finished=True)]))
    tell(received(report("i0", acked_seq=7)))
    assert (counts.totals()["lengths/cut"], counts.totals()["lengths/sampled/mean"]) == (0, 5.0)


def test_of_a_lost_instance_and_at_the_end_what_is_known_is_counted() -> None:
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    tell(CommandSent(ABORT))
    tell(Released([response(4, reason=None)], "aborted"))
    tell(InstanceDown(instance="i0", incarnation=1, reason="it died"))
    assert counts.take()["lengths/cut"] == 1
    tell(CommandSent(ABORT))
    tell(Released([response(4, reason=None)], "aborted"))
    assert counts.totals()["lengths/cut"] == 2


def test_what_the_end_of_the_run_drops_is_not_counted() -> None:
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    tell(CommandSent(ABORT))
    tell(Released([response(4, reason=None)], "discarded"))
    tell(Released([response(4, reason=None)], "discarded"))
    tell(received(report("i0", acked_seq=7)))
    assert counts.totals()["lengths/sampled/mean"] == 0.0


def test_a_row_has_the_same_names_whatever_happened_and_the_total_goes_on() -> None:
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    tell(GenerationEnded(response(6, prompt=5)))
    first = counts.take()
    second = counts.take()
    assert set(first) == set(second)
    assert set(second.values()) == {0}
    tell(GenerationEnded(response(4, prompt=9)))
    total = counts.totals()
    assert total["lengths/sampled/4"] == 2
    assert total["lengths/sampled/mean"] == 5.0
    assert (total["prompt_lengths/sampled/4"], total["prompt_lengths/sampled/8"]) == (1, 1)
    assert total["prompt_lengths/sampled/mean"] == 7.0


def test_given_up_expired_and_resampled_ones_are_cut_and_finished_ones_count_once() -> None:
    """Response lengths 2, 4 and 9 were cut; 6 had finished when it was dropped."""
    counts = LengthCounts(longest=20)
    tell = teller(counts)
    tell(GenerationEnded(response(2, id_="a", reason=FinishReason.FAILED)))
    tell(Released([response(4, id_="b", reason=None)], "expired"))
    tell(StragglerResampled(dropped=response(9, id_="c", reason=None), new_id="d", reason="takes too long"))
    tell(GenerationEnded(response(6, id_="e")))
    tell(Released([response(6, id_="e")], "filtered"))
    values = counts.take()
    assert [values[f"lengths/sampled/{b}"] for b in (1, 2, 4, 8, 16)] == [0, 1, 2, 1, 0]
    assert values["lengths/cut"] == 3
    assert values["lengths/sampled/mean"] == 21 / 4
