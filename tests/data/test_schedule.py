"""PromptSchedule: every prompt exactly as often as asked, also across resumes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.data.schedule import PromptSchedule, check_batch_size
from staleflow.errors import ConfigError, DataError


def test_two_epochs_of_six_prompts_are_twelve_uses_and_then_the_end() -> None:
    """F23, F17."""
    schedule = PromptSchedule(6, epochs=2, seed=3)
    uses = list(schedule)
    assert len(uses) == 12
    assert Counter(uses) == {(e, i): 1 for e in range(2) for i in range(6)}
    assert [e for e, _ in uses] == [0] * 6 + [1] * 6
    with pytest.raises(StopIteration):
        next(schedule)


def test_a_resumed_run_uses_what_is_left_unfinished_prompts_first() -> None:
    """F19, F23: the first run drew seven, trained five; the two in flight come first."""
    first = list(islice(PromptSchedule(4, epochs=2, seed=1), 7))
    trained = [first[0], first[1], first[3], first[4], first[6]]
    used: dict[int, set[int]] = {}
    for epoch, index in trained:
        used.setdefault(epoch, set()).add(index)
    rest = list(PromptSchedule(4, epochs=2, seed=1, used=used))
    assert rest[:2] == [first[2], first[5]]
    assert Counter(trained + rest) == {(e, i): 1 for e in range(2) for i in range(4)}


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2**12)), max_size=5),
)
def test_whatever_is_lost_at_each_stop_uses_add_up_to_the_data_set_times_epochs(
    n: int, epochs: int, seed: int, stops: list[tuple[int, int]]
) -> None:
    """F19: each attempt draws some prompts, of which a random part was finished when it was killed."""
    used: dict[int, set[int]] = {}
    finished: Counter[tuple[int, int]] = Counter()
    for drawn, kept in [*stops, (n * epochs, -1)]:
        schedule = PromptSchedule(n, epochs=epochs, seed=seed, used=used)
        for position, (epoch, index) in enumerate(islice(schedule, drawn)):
            if kept >> position & 1:
                finished[epoch, index] += 1
                used.setdefault(epoch, set()).add(index)
    assert finished == {(e, i): 1 for e in range(epochs) for i in range(n)}


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    schedule = PromptSchedule(50, seed=7)
    assert schedule.order(3) == PromptSchedule(50, seed=7, used={3: {1}}).order(3)
    assert schedule.order(3) != schedule.order(4)
    assert schedule.order(3) != PromptSchedule(50, seed=8).order(3)


def test_without_shuffling_prompts_come_in_file_order_for_ever() -> None:
    uses = list(islice(PromptSchedule(3, shuffle=False), 7))
    assert uses == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_a_schedule_does_not_follow_later_changes_of_the_given_uses() -> None:
    used = {0: {0}}
    schedule = PromptSchedule(2, epochs=1, shuffle=False, used=used)
    used[0].add(1)
    assert list(schedule) == [(0, 1)]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="The data set is empty"):
        PromptSchedule(0)


def test_a_batch_larger_than_the_data_set_is_refused_with_both_numbers() -> None:
    check_batch_size(7, 7, epochs=1)
    with pytest.raises(ConfigError, match=r"batch_size is 8, .* only 7 prompts"):
        check_batch_size(8, 7, epochs=None)
