"""When a trajectory leaves an instance; expected moves worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from pictures import interrupts, picture, resident, state_of, view, waiting

from staleflow.coordination.actions import Interrupt
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.migration import CostAwareMigration, MigrationSettings, NaiveMigration
from staleflow.coordination.policies import PolicySettings, build_coordinator
from staleflow.coordination.snapshot import Resident, Snapshot
from staleflow.coordination.speculative import SpeculativeState
from staleflow.protocol.buffer import StalenessBuffer

ATTENTION = CostModel(k1=1e-5, k2=0.01, k3=0.0, k4=0.0, prefill=1e-4, pull=1.0)
"""A step takes 10 ms and 10 µs for each cached token; a token's prefill 100 µs."""


def crowd(count: int, length: int = 1000, **values: object) -> tuple[Resident, ...]:
    return tuple(resident(f"t{n}", length=length, **values) for n in range(count))


def cluster(
    there: tuple[Resident, ...], *, waiting: int = 0, idle_version: int = 0, now: float = 100.0
) -> Snapshot:
    """All of `there` on i0, nothing on i1."""
    buffer = StalenessBuffer(bound=1, batch_size=64)
    for one in there:
        buffer.reserve(one.group_id, one.group_version)
    running = len(there) - waiting
    tokens = sum(r.length for r in there[:running])
    instances = [
        view("i0", 0, running=running, waiting=waiting, kv_tokens=tokens, kv_capacity=100_000),
        view("i1", idle_version, kv_capacity=100_000),
    ]
    return picture(
        buffer, instances, newest=0, residents={"i0": there}, costs=ATTENTION, expected_growth=2000, now=now
    )


def moved(snapshot: Snapshot, settings: MigrationSettings | None = None) -> SpeculativeState:
    state = state_of(snapshot)
    CostAwareMigration(settings).migrate(state)
    return state


def test_naive_moves_nothing() -> None:
    state = state_of(cluster(crowd(10)))
    NaiveMigration().migrate(state)
    assert state.commands == []


def test_an_idle_instance_takes_over_until_another_move_would_not_pay() -> None:
    """Ten with 1,000 tokens each: a step takes 110 ms on i0 and 20 ms for one alone on i1.

    T(n) = n / (0.01 + 0.01 n). The first move gains T(1) - T(0) + T(9) - T(10) = 50 - 0.9 = 49 tokens/s.
    A second would gain T(2) - T(1) - (T(9) - T(8)) = 16.7 - 1.1, and so on: from five against five on, a move
    only changes the sides.
    """
    state = moved(cluster(crowd(10)))
    assert interrupts(state) == [(f"t{n}", "i0") for n in range(len(state.commands))]
    assert 1 <= len(state.commands) <= 5
    first = state.commands[0]
    assert isinstance(first, Interrupt)
    assert first.reason.startswith("migration: 0 run on i1, 10 on i0; saves ")


def test_a_long_trajectory_stays_where_its_new_prefill_costs_more_than_the_move_saves() -> None:
    """F35: 50,000 tokens whose prefill takes 5 s, with an expected gain of less than that."""
    pair = (resident("huge", length=50_000, response=10), resident("small", length=10, response=10))
    slow_prefill = replace(ATTENTION, prefill=1e-2)
    snapshot = replace(cluster(pair), costs=slow_prefill, expected_growth=20)
    assert ("huge", "i0") not in interrupts(moved(snapshot))
    cheap = replace(cluster(pair), costs=replace(ATTENTION, prefill=0.0), expected_growth=20)
    assert ("huge", "i0") in interrupts(moved(cheap))


def test_where_an_engine_holds_less_than_one_of_its_trajectories_no_step_takes_negative_time() -> None:
    """F15: it has lost `lost`; 2,000 - 3,000 tokens would make a step of the others take 10 ms - 10 ms."""
    pair = (resident("lost", length=3000), resident("other", length=2000))
    snapshot = cluster(pair)
    there = view("i0", 0, running=2, kv_tokens=2000, kv_capacity=100_000)
    lossy = replace(snapshot, instances={**snapshot.instances, "i0": there})
    assert interrupts(moved(lossy)) == [("lost", "i0")]


def test_one_near_the_longest_response_stays_for_it_has_little_left() -> None:
    """Without a limit 1,000 tokens are taken to go on for 1,000 more; with one at 1,001 there is one left.

    The first move gains 49 tokens/s for steps of 20 ms: 1,000 of them are worth 980 tokens, one is worth 1,
    and the prefill of 1,000 tokens costs 0.1 s of 9 tokens/s, 0.9 tokens. Twice that prefill is too much.
    """
    dear = replace(cluster(crowd(10)), costs=replace(ATTENTION, prefill=2e-4), expected_growth=1000)
    assert moved(dear).commands != []
    assert moved(dear, MigrationSettings(longest_response=1001)).commands == []


def test_where_a_step_costs_the_same_however_many_run_nothing_moves() -> None:
    """A floor of loading the weights: two instances with five generate what one with ten does."""
    flat = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, prefill=1e-4, pull=1.0)
    assert moved(replace(cluster(crowd(10)), costs=flat)).commands == []


def test_a_gap_smaller_than_psi_is_left_alone() -> None:
    there = crowd(10)
    snapshot = cluster(there)
    busy = view("i1", 0, running=2, kv_tokens=2000, kv_capacity=100_000)
    snapshot = replace(snapshot, instances={**snapshot.instances, "i1": busy})
    # T(10) = 90.9, T(2) = 66.7: a ratio of 1.4
    assert moved(snapshot).commands == []
    assert moved(snapshot, MigrationSettings(psi_throughput=1.2)).commands != []


def test_one_that_has_just_arrived_rests_and_one_without_progress_does_not_move() -> None:
    """F35: no ping-pong."""
    assert moved(cluster(crowd(10, routed_at=99.0))).commands == []
    assert moved(cluster(crowd(10, routed_at=97.9))).commands != []
    assert moved(cluster(crowd(10, routed_length=1000))).commands == []


def test_it_says_when_the_first_of_those_that_rest_may_move() -> None:
    state = state_of(cluster(crowd(10, routed_at=99.0)))
    assert CostAwareMigration().migrate(state) == 101.0


def busy_elsewhere(snapshot: Snapshot) -> Snapshot:
    """One runs on i1 already."""
    one = view("i1", 0, running=1, kv_tokens=1000, kv_capacity=100_000)
    return replace(snapshot, instances={**snapshot.instances, "i1": one})


def test_the_tail_of_a_waiting_queue_moves_first_and_only_what_exceeds_phi() -> None:
    """Seven of ten wait inside i0, φ_wait is 3: the last four leave, none of the running ones."""
    state = moved(busy_elsewhere(cluster(crowd(10), waiting=7)))
    assert interrupts(state) == [("t9", "i0"), ("t8", "i0"), ("t7", "i0"), ("t6", "i0")]
    assert moved(busy_elsewhere(cluster(crowd(10), waiting=3))).commands == []


def test_none_waits_where_an_instance_is_empty() -> None:
    assert interrupts(moved(cluster(crowd(10), waiting=1))) == [("t9", "i0")]


def test_one_that_was_moved_twice_for_nothing_waits_where_it_is() -> None:
    """F35: no ping-pong of waiting trajectories either."""
    tired = crowd(10, fruitless=2)
    assert moved(busy_elsewhere(cluster(tired, waiting=7))).commands == []
    assert len(moved(busy_elsewhere(cluster(crowd(10, fruitless=1), waiting=7))).commands) == 4


def test_nothing_moves_to_an_instance_whose_version_the_reservation_does_not_admit() -> None:
    buffer_version = 0
    there = tuple(resident(f"t{n}", version=buffer_version, length=1000) for n in range(10))
    assert moved(cluster(there, idle_version=-1)).commands == []


def test_no_new_wave_starts_while_one_is_under_way() -> None:
    snapshot = cluster(crowd(10))
    leaving = Interrupt(instance="i0", incarnation=1, seq=1, trajectory_id="t0", length=1000)
    i0 = snapshot.instances["i0"].snapshot
    busy = view("i0", 0, leaving, running=i0.running, kv_tokens=i0.kv_tokens, kv_capacity=i0.kv_capacity)
    assert moved(replace(snapshot, instances={**snapshot.instances, "i0": busy})).commands == []


def test_room_is_kept_where_a_moved_trajectory_is_to_go_on_until_it_is_back() -> None:
    """i1 has 100 of 1,000 tokens, and 700 are on their way to it: there is no room for 400 new ones."""
    buffer = StalenessBuffer(bound=0, batch_size=4)
    fresh = waiting(("new", "g", None, 400))
    coming = Interrupt(instance="i0", incarnation=1, seq=1, trajectory_id="t", length=700, target="i1")
    full = {"running": 2, "kv_tokens": 990, "max_running": 1}
    for outstanding, expected in (((), ["i1"]), ((coming,), [])):
        instances = [view("i0", 0, *outstanding, **full), view("i1", 0, running=1, kv_tokens=100)]
        commands = (
            build_coordinator("staleflow", PolicySettings())
            .step(picture(buffer, instances, fresh, newest=0))
            .commands
        )
        assert [c.instance for c in commands] == expected
