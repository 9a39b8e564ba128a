"""Admission, preemption and budgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.scheduler import Schedule, Scheduler

New = Callable[..., Trajectory]


def ids(schedule: Schedule) -> tuple[list[str], list[str]]:
    return [g.trajectory_id for g in schedule.admitted], [g.trajectory_id for g in schedule.preempted]


def scheduler(capacity: int = 100, running: int = 8, model_len: int = 64) -> Scheduler:
    return Scheduler(kv_capacity=capacity, max_running=running, max_model_len=model_len)


def test_admits_in_order_of_arrival_while_tokens_and_one_more_each_fit(new_trajectory: New) -> None:
    s = scheduler(capacity=18)
    for name in "abc":
        s.add(new_trajectory(name, 5))
    # 6 + 6 + 6 = 18 is just right.
    assert ids(s.schedule()) == (["a", "b", "c"], [])
    assert s.kv_tokens == 15
    s = scheduler(capacity=17)
    for name in "abc":
        s.add(new_trajectory(name, 5))
    assert ids(s.schedule()) == (["a", "b"], [])
    assert s.waiting_count == 1


def test_a_long_one_at_the_front_is_not_overtaken(new_trajectory: New) -> None:
    s = scheduler(capacity=20)
    for name, length in (("a", 5), ("long", 15), ("short", 2)):
        s.add(new_trajectory(name, length))
    assert ids(s.schedule()) == (["a"], [])
    s.remove(["a"])
    assert ids(s.schedule()) == (["long", "short"], [])


def test_max_running_bounds_the_batch(new_trajectory: New) -> None:
    s = scheduler(running=2)
    for name in "abc":
        s.add(new_trajectory(name, 2))
    assert ids(s.schedule()) == (["a", "b"], [])


def test_when_decode_would_exceed_the_cache_the_youngest_gives_way_and_returns_first(
    new_trajectory: New,
) -> None:
    s = scheduler(capacity=14)
    for name in "abc":
        s.add(new_trajectory(name, 5))
    assert ids(s.schedule()) == (["a", "b"], [])
    for generation in s.running:
        generation.append(1, -1.0, 0)
    assert ids(s.schedule()) == ([], [])  # 7 + 7
    for generation in s.running:
        generation.append(1, -1.0, 0)
    assert ids(s.schedule()) == ([], ["b"])  # 8 + 8 > 14
    assert (s.preemptions, s.waiting_count, s.kv_tokens) == (1, 2, 7)
    assert next(g for g in s.held if g.trajectory_id == "b").trajectory().response_len == 2
    s.remove(["a"])
    assert ids(s.schedule()) == (["b", "c"], [])  # b before c: 8 + 6 = 14


def test_one_that_can_never_fit_is_refused_and_changes_nothing(new_trajectory: New) -> None:
    s = scheduler(capacity=10)
    with pytest.raises(
        EngineError, match=r"t has 10 tokens and cannot gain one more in a KV cache of 10 tokens"
    ):
        s.add(new_trajectory("t", 10))
    assert list(s.held) == []
    s.add(new_trajectory("t", 9))


def test_duplicates_finished_ones_and_empty_prompts_are_refused(new_trajectory: New) -> None:
    s = scheduler()
    s.add(new_trajectory("t"))
    with pytest.raises(EngineError, match="already in this engine"):
        s.add(new_trajectory("t"))
    with pytest.raises(EngineError, match="already finished"):
        s.add(new_trajectory("u").finished(FinishReason.STOP))
    with pytest.raises(EngineError, match="empty prompt"):
        s.add(new_trajectory("v", []))
    assert len(list(s.held)) == 1


def test_budget_model_length_and_capacity_each_bound_the_length(new_trajectory: New) -> None:
    s = scheduler(capacity=40, model_len=30)
    s.add(new_trajectory("budget", 5, max_new_tokens=7))
    s.add(new_trajectory("model", 5, max_new_tokens=100))
    assert [g.bound for g in s.held] == [12, 30]
    s = scheduler(capacity=20, model_len=30)
    s.add(new_trajectory("capacity", 5, max_new_tokens=100))
    assert [g.bound for g in s.held] == [20]


def test_one_with_no_budget_left_needs_no_room_and_is_spent_at_once(new_trajectory: New) -> None:
    s = scheduler(capacity=10)
    s.add(new_trajectory("waits", 8))
    full = new_trajectory("full", 8, max_new_tokens=3).extended(Segment.given([1, 2, 3]))
    s.add(full)
    schedule = s.schedule()
    assert [g.trajectory_id for g in schedule.spent] == ["full"]
    assert [g.trajectory_id for g in s.held] == ["waits"]


def test_remove_tells_the_running_from_the_waiting_and_skips_the_unknown(new_trajectory: New) -> None:
    s = scheduler(running=1)
    for name in "ab":
        s.add(new_trajectory(name))
    s.schedule()
    gone, were_running = s.remove(["b", "nobody", "a", "a"])
    assert [g.trajectory_id for g in gone] == ["b", "a"]
    assert [g.trajectory_id for g in were_running] == ["a"]
    assert (list(s.held), s.waiting_count, s.kv_tokens) == ([], 0, 0)
