"""Snapshot in, commands out. Expected command lists are worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staleflow.coordination.actions import Admission, Command, Interrupt, Pull, Route
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting, has_room
from staleflow.coordination.snapshot import (
    InstanceSnapshot,
    InstanceView,
    PendingTrajectories,
    PendingTrajectory,
    Snapshot,
)
from staleflow.coordination.speculative import InstanceState, speculate
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.protocol.buffer import StalenessBuffer


def coordinator() -> Coordinator:
    return Coordinator(
        routing=NaiveRouting(), synchronization=NaiveSynchronization(), migration=NaiveMigration()
    )


def view(name: str, version: int, *outstanding: Command, revision: int = 1, **values: Any) -> InstanceView:
    fields = {
        "running": 0,
        "waiting": 0,
        "kv_tokens": 0,
        "kv_capacity": 1000,
        "max_running": 8,
        "acked_seq": 0,
    }
    snapshot = InstanceSnapshot(
        instance=name, incarnation=1, revision=revision, version=version, **(fields | values)
    )
    return InstanceView(snapshot=snapshot, outstanding=outstanding, next_seq=1 + len(outstanding))


def pending(*items: tuple[str, str, int | None]) -> PendingTrajectories:
    queue = PendingTrajectories()
    for trajectory, group, version in items:
        queue.add(
            PendingTrajectory(trajectory_id=trajectory, group_id=group, group_version=version, length=10)
        )
    return queue


def snapshot(
    buffer: StalenessBuffer, instances: list[InstanceView], waiting: PendingTrajectories, newest: int
) -> Snapshot:
    views: Mapping[str, InstanceView] = {v.snapshot.instance: v for v in instances}
    return Snapshot(
        now=0.0,
        next_buffer=buffer.next_buffer,
        newest_version=newest,
        counts=buffer.counts(),
        reservable=100,
        pending=waiting,
        instances=views,
        group_members=2,
        expected_growth=20,
        expected_held=30,
    )


def routes(commands: tuple[Command, ...]) -> list[tuple[str, str, int, Admission | None]]:
    return [
        (c.trajectory_id, c.instance, c.min_version, c.admission) for c in commands if isinstance(c, Route)
    ]


RESERVE_0 = Admission(kind="reserve", version=0)


def test_members_of_a_new_group_spread_and_only_the_first_reserves() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=2)
    waiting = pending(("a0", "a", None), ("a1", "a", None), ("b0", "b", None))
    decision = coordinator().step(snapshot(buffer, [view("i0", 0), view("i1", 0)], waiting, newest=0))
    assert routes(decision.commands) == [
        ("a0", "i0", 0, RESERVE_0),
        ("a1", "i1", 0, None),
        ("b0", "i0", 0, RESERVE_0),
    ]


def test_no_more_groups_are_reserved_than_the_buffer_can_place() -> None:
    """F3, F4: with a bound of 0 exactly one batch may be under way, and it may."""
    buffer = StalenessBuffer(bound=0, batch_size=2)
    waiting = pending(("a0", "a", None), ("b0", "b", None), ("c0", "c", None))
    decision = coordinator().step(snapshot(buffer, [view("i0", 0)], waiting, newest=0))
    assert [r[0] for r in routes(decision.commands)] == ["a0", "b0"]


def test_with_bound_zero_nothing_starts_on_the_weights_of_the_step_in_training() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=1, next_buffer=1)
    decision = coordinator().step(snapshot(buffer, [view("i0", 0)], pending(("a0", "a", None)), newest=0))
    assert decision.commands == ()


def test_a_stale_instance_pulls_first_and_is_routed_to_under_its_new_version() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=1, next_buffer=1)
    decision = coordinator().step(snapshot(buffer, [view("i0", 0)], pending(("a0", "a", None)), newest=1))
    first, second = decision.commands
    assert isinstance(first, Pull)
    assert (first.seq, first.version) == (1, 1)
    assert isinstance(second, Route)
    assert (second.seq, second.min_version, second.admission) == (2, 1, Admission(kind="reserve", version=1))


def test_unacknowledged_commands_count_as_done() -> None:
    """An ordered Pull is not ordered again, and ordered Routes take room."""
    buffer = StalenessBuffer(bound=1, batch_size=4, next_buffer=1)
    pull = Pull(instance="i0", incarnation=1, seq=1, version=1)
    busy = [
        Route(
            instance="i0",
            incarnation=1,
            seq=s,
            trajectory_id=f"t{s}",
            group_id="g",
            min_version=1,
            length=10,
        )
        for s in (2, 3)
    ]
    instances = [view("i0", 0, pull, *busy), view("i1", 1, running=1)]
    decision = coordinator().step(snapshot(buffer, instances, pending(("a0", "a", 1)), newest=1))
    assert routes(decision.commands) == [("a0", "i1", 1, None)]


def test_a_trajectory_goes_on_only_where_its_reservation_admits_the_version() -> None:
    """i0 is less loaded but older than V_group, and lowering would break the condition."""
    buffer = StalenessBuffer(bound=1, batch_size=1, next_buffer=2)
    buffer.reserve("a", 2)  # deadline 3
    buffer.reserve("b", 1)  # deadline 2: that buffer is full now
    old = view("i0", 1)
    new = view("i1", 2, running=3)
    plain = Coordinator(routing=NaiveRouting(), synchronization=NoPulls(), migration=NaiveMigration())
    decision = plain.step(snapshot(buffer, [old, new], pending(("a0", "a", 2)), newest=2))
    assert routes(decision.commands) == [("a0", "i1", 2, None)]


def test_a_group_is_lowered_when_only_an_older_instance_has_room() -> None:
    buffer = StalenessBuffer(bound=1, batch_size=1, next_buffer=2)
    buffer.reserve("a", 2)
    old = view("i0", 1)
    new = view("i1", 2, running=8)
    plain = Coordinator(routing=NaiveRouting(), synchronization=NoPulls(), migration=NaiveMigration())
    decision = plain.step(snapshot(buffer, [old, new], pending(("a0", "a", 2)), newest=2))
    assert routes(decision.commands) == [("a0", "i0", 1, Admission(kind="lower", version=1))]


def test_ties_do_not_all_fall_on_the_first_instance() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=8)
    policy = coordinator()
    targets = []
    for n in range(4):
        waiting = pending((f"a{n}", f"g{n}", None))
        decision = policy.step(snapshot(buffer, [view("i0", 0), view("i1", 0)], waiting, newest=0))
        targets += [r[1] for r in routes(decision.commands)]
    assert targets == ["i0", "i1", "i0", "i1"]


def test_step_changes_nothing_in_the_snapshot() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=2)
    waiting = pending(("a0", "a", None), ("b0", "b", None))
    seen = snapshot(buffer, [view("i0", 0)], waiting, newest=0)
    counts, queue = seen.counts.as_tuple(), list(waiting)
    first = coordinator().step(seen)
    assert (seen.counts.as_tuple(), list(waiting)) == (counts, queue)
    assert coordinator().step(seen) == first


def test_a_coordinator_that_remembers_decides_like_one_that_reads_everything_anew() -> None:
    buffer = StalenessBuffer(bound=1, batch_size=4)
    old = coordinator()
    for revision in range(1, 5):
        instances = [view("i0", 0, revision=1, running=2), view("i1", 0, revision=revision, running=revision)]
        waiting = pending((f"a{revision}", f"g{revision}", None))
        state = snapshot(buffer, instances, waiting, newest=0)
        fresh = coordinator()
        decision = old.step(state)
        assert [(c.instance, c.seq) for c in decision.commands] == [
            (c.instance, c.seq) for c in fresh.step(state).commands
        ]


def test_has_room_leaves_a_tenth_of_the_kv_cache_free() -> None:
    state = InstanceState(
        instance="i0",
        incarnation=1,
        version=0,
        resident=1,
        waiting=0,
        kv_tokens=800,
        kv_capacity=1000,
        max_running=8,
        next_seq=1,
    )
    assert has_room(state, length=100, expected_held=450)  # 800 + 100 and 2 * 450 are 900
    assert not has_room(state, length=101, expected_held=450)
    assert not has_room(state, length=0, expected_held=451)


def test_apply_adds_and_removes_what_the_command_says() -> None:
    route = Route(
        instance="i0", incarnation=1, seq=5, trajectory_id="t", group_id="g", min_version=0, length=7
    )
    state = speculate(view("i0", 0, kv_tokens=10, running=1))
    state.apply(route)
    assert (state.resident, state.kv_tokens, state.next_seq) == (2, 17, 6)
    state.apply(Pull(instance="i0", incarnation=1, seq=6, version=3))
    assert (state.version, state.next_seq) == (3, 7)
    state.apply(Interrupt(instance="i0", incarnation=1, seq=7, trajectory_id="t", length=7))
    assert (state.resident, state.kv_tokens) == (1, 10)


def test_one_that_waits_inside_the_instance_leaves_its_queue_not_its_cache() -> None:
    state = speculate(view("i0", 0, kv_tokens=10, running=1, waiting=2))
    state.apply(Interrupt(instance="i0", incarnation=1, seq=1, trajectory_id="t", length=0))
    assert (state.resident, state.waiting, state.running, state.kv_tokens) == (2, 1, 1, 10)


class NoPulls:
    def synchronize(self, state: object) -> None:
        """Order nothing."""

    def after_routing(self, state: object) -> bool:
        """Order nothing."""
        return False
