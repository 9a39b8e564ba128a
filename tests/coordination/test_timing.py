"""When something is overdue, and when a cycle must look: time comes with cycles only, events carry none."""

from __future__ import annotations

import math

from staleflow.coordination.timing import Deadlines, ProgressWatch


def test_progress_counts_from_the_cycle_that_follows_it_however_long_the_last_one_is_ago() -> None:
    watch = ProgressWatch(10.0)
    watch.touch("a")
    assert watch.overdue(0.0) == []
    assert watch.next_due == 10.0
    watch.touch("a")  # a token came at 9.5, say: there was no cycle between 0 and 9.6
    assert watch.overdue(9.6) == []
    assert watch.next_due == 19.6
    assert watch.overdue(19.5) == []
    assert watch.overdue(19.7) == ["a"]
    assert (watch.overdue(99.0), watch.next_due) == ([], math.inf)


def test_what_is_due_is_overdue_at_that_very_moment_whatever_the_rounding() -> None:
    """Else a loop that wakes for it would wake again at once, for ever: 8.7 - 0.7 rounds to less than 8."""
    watch = ProgressWatch(8.0)
    watch.touch("a")
    watch.stamp(0.7)
    assert 8.7 - 0.7 < 8.0
    assert watch.next_due == 8.7
    assert watch.overdue(8.7) == ["a"]


def test_the_oldest_progress_is_due_first_and_what_is_forgotten_never() -> None:
    watch = ProgressWatch(10.0)
    for time, key in ((0.0, "a"), (1.0, "b"), (2.0, "c")):
        watch.touch(key)
        watch.stamp(time)
    watch.touch("a")
    watch.stamp(3.0)
    watch.forget("b")
    assert watch.next_due == 12.0
    assert watch.overdue(12.5) == ["c"]
    assert watch.next_due == 13.0


def test_without_a_limit_nothing_is_watched() -> None:
    watch = ProgressWatch(math.inf)
    watch.touch("a")
    assert (watch.overdue(1e9), watch.next_due) == ([], math.inf)


def test_a_time_limit_begins_with_the_next_cycle() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("b", 1.0)
    deadlines.set("c", 1.0)
    deadlines.forget("c")
    assert deadlines.expired(100.0) == []
    assert deadlines.next_due == 101.0
    assert deadlines.expired(102.0) == ["b"]
    assert deadlines.expired(104.9) == []
    assert deadlines.expired(105.0) == ["a"]
