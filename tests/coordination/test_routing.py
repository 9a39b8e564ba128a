"""Waterfall routing and the baselines' routing; expected targets worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import ATTENTION_BOUND, picture, routes, state_of, view, waiting

from staleflow.coordination.actions import Admission, Route
from staleflow.coordination.routing import (
    CentralQueueRouting,
    NaiveRouting,
    RoutingStrategy,
    StaticRouting,
    WaterfallRouting,
)
from staleflow.protocol.buffer import StalenessBuffer


def test_the_costs_that_the_expectations_here_rest_on() -> None:
    # one running with 100 tokens, one of 10 more: 2 / 0.12 - 1 / 0.11; four with 40: 5 / 0.06 - 4 / 0.05
    assert ATTENTION_BOUND.gain(1, 100, 10) == pytest.approx(7.5758, abs=1e-4)
    assert ATTENTION_BOUND.gain(4, 40, 10) == pytest.approx(3.3333, abs=1e-4)
    assert ATTENTION_BOUND.ideal_gain(10) == pytest.approx(50)


def test_a_trajectory_goes_where_it_adds_most_not_where_fewest_tokens_are() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=1)
    instances = [view("long", 0, running=1, kv_tokens=100), view("many", 0, running=4, kv_tokens=40)]
    state = state_of(picture(buffer, instances, waiting(("a", "g", None, 10)), newest=0))
    WaterfallRouting(mu=0.0).route(state)
    assert routes(state) == [("a", "long")]


def test_each_route_counts_for_the_next_one() -> None:
    """By hand: an empty instance gains 50, one with ten tokens there 2 / 0.03 - 1 / 0.02 = 16.7, then 8.3."""
    buffer = StalenessBuffer(bound=0, batch_size=1)
    items = [(f"m{i}", "g", None, 10) for i in range(5)]
    instances = [view("i0", 0), view("i1", 0), view("far", 0, running=2, kv_tokens=200)]
    state = state_of(picture(buffer, instances, waiting(*items), newest=0))
    WaterfallRouting(mu=0.0).route(state)
    assert [instance for _, instance in routes(state)] == ["i0", "i1", "i0", "i1", "i0"]


def test_a_small_gain_is_not_taken_unless_the_next_buffer_needs_it() -> None:
    """Gain 3.3 of an ideal 50 is less than μ = 0.3 of it."""
    crowded = [view("many", 0, running=4, kv_tokens=40)]
    free = StalenessBuffer(bound=1, batch_size=1)
    state = state_of(picture(free, crowded, waiting(("a", "g", None, 10)), newest=0))
    WaterfallRouting(mu=0.3).route(state)
    assert routes(state) == []
    urgent = StalenessBuffer(bound=0, batch_size=1)
    state = state_of(picture(urgent, crowded, waiting(("a", "g", None, 10)), newest=0))
    WaterfallRouting(mu=0.3).route(state)
    assert routes(state) == [("a", "many")]


def test_what_the_next_buffer_needs_goes_even_where_it_costs_throughput() -> None:
    """2 / (0.01 + 0.5) - 1 / (0.01 + 0.1): a loss of 5 tokens/s, and the trainer would wait otherwise."""
    assert ATTENTION_BOUND.gain(1, 100, 400) == pytest.approx(-5.17, abs=0.01)
    urgent = StalenessBuffer(bound=0, batch_size=1)
    busy = [view("i0", 0, running=1, kv_tokens=100)]
    state = state_of(picture(urgent, busy, waiting(("a", "g", None, 400)), newest=0))
    WaterfallRouting().route(state)
    assert routes(state) == [("a", "i0")]


def test_a_critical_level_does_not_open_the_door_for_a_later_one() -> None:
    """η = 1, next buffer 1: V = 0 is due in buffer 1, a new group of V = 1 only in buffer 2."""
    buffer = StalenessBuffer(bound=1, batch_size=4, next_buffer=1)
    buffer.reserve("old", 0)
    crowded = [view("many", 1, running=4, kv_tokens=40)]
    items = waiting(("new", "fresh", None, 10), ("late", "old", 0, 10))
    state = state_of(picture(buffer, crowded, items, newest=1))
    WaterfallRouting(mu=0.3).route(state)
    assert routes(state) == [("late", "many")]


def test_older_reservations_go_first_and_fresh_groups_last() -> None:
    buffer = StalenessBuffer(bound=2, batch_size=4, next_buffer=1)
    buffer.reserve("one", 1)
    buffer.reserve("zero", 0)
    items = waiting(("c", "new", None, 10), ("b", "one", 1, 10), ("a", "zero", 0, 10))
    state = state_of(picture(buffer, [view("i0", 1)], items, newest=1))
    WaterfallRouting(mu=0.0).route(state)
    assert [name for name, _ in routes(state)] == ["a", "b", "c"]


def test_lowering_a_group_is_the_second_choice() -> None:
    buffer = StalenessBuffer(bound=1, batch_size=4, next_buffer=2)
    buffer.reserve("a", 2)
    empty_but_old, busy_but_new = view("i0", 1), view("i1", 2, running=1, kv_tokens=10)
    state = state_of(picture(buffer, [empty_but_old, busy_but_new], waiting(("t", "a", 2, 10)), newest=2))
    WaterfallRouting(mu=0.0).route(state)
    assert routes(state) == [("t", "i1")]
    full = view("i1", 2, running=1, kv_tokens=995)
    state = state_of(picture(buffer, [empty_but_old, full], waiting(("t", "a", 2, 10)), newest=2))
    WaterfallRouting(mu=0.0).route(state)
    (route,) = state.commands
    assert isinstance(route, Route)
    assert (route.instance, route.admission) == ("i0", Admission(kind="lower", version=1))


def test_a_group_without_a_firm_place_starts_as_a_spare_while_spares_are_free() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=1, spare_limit=1)
    items = waiting(("a", "a", None, 10), ("b", "b", None, 10), ("c", "c", None, 10))
    state = state_of(picture(buffer, [view("i0", 0)], items, newest=0, spares_free=1))
    WaterfallRouting(mu=0.0).route(state)
    admissions = [c.admission for c in state.commands if isinstance(c, Route)]
    assert admissions == [
        Admission(kind="reserve", version=0),
        Admission(kind="reserve", version=0, spare=True),
    ]


def test_a_long_one_keeps_the_roomiest_instance_so_that_short_ones_cannot_starve_it() -> None:
    """500 tokens fit nowhere now; i1 has most room free and takes no other, i0 does."""
    buffer = StalenessBuffer(bound=0, batch_size=8)
    buffer.reserve("g", 0)
    items = waiting(("long", "g", 0, 500), *[(f"s{i}", "g", 0, 10) for i in range(3)])
    instances = [view("i0", 0, running=2, kv_tokens=600), view("i1", 0, running=2, kv_tokens=550)]
    state = state_of(picture(buffer, instances, items, newest=0))
    WaterfallRouting(mu=0.0).route(state)
    assert routes(state) == [("s0", "i0"), ("s1", "i0"), ("s2", "i0")]


def test_nothing_is_added_where_some_wait_inside_the_instance() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=1)
    instances = [view("i0", 0, running=1, waiting=1, kv_tokens=10), view("i1", 0, running=3, kv_tokens=30)]
    state = state_of(picture(buffer, instances, waiting(("a", "g", None, 10)), newest=0))
    WaterfallRouting(mu=0.0).route(state)
    assert routes(state) == [("a", "i1")]


def test_the_central_queue_fills_the_emptiest_up_to_the_cap_whatever_the_cache_holds() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=8)
    items = [(f"m{i}", "g", None, 10) for i in range(6)]
    instances = [view("i0", 0, running=2, kv_tokens=999), view("i1", 0)]
    state = state_of(picture(buffer, instances, waiting(*items), newest=0))
    CentralQueueRouting(max_per_instance=3).route(state)
    assert [i for _, i in routes(state)] == ["i1", "i1", "i0", "i1"]


def test_static_routing_sends_whole_groups_to_one_instance_whatever_room_there_is() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=3)
    items = [(f"{g}{m}", g, None, 10) for g in "abc" for m in range(2)]
    instances = [view("i0", 0, running=1, waiting=1, kv_tokens=999), view("i1", 0)]
    state = state_of(picture(buffer, instances, waiting(*items), newest=0))
    StaticRouting().route(state)
    where = dict(routes(state))
    # a to the empty i1 (0 against 2); then both have 2 and i0 was not routed to yet; then i1 has 2, i0 4
    assert [where["a0"], where["b0"], where["c0"]] == ["i1", "i0", "i1"]
    assert all(where[f"{g}0"] == where[f"{g}1"] for g in "abc")


@given(data=st.data())
@pytest.mark.parametrize("strategy", [WaterfallRouting(mu=0.0), WaterfallRouting(), NaiveRouting()])
def test_no_route_goes_past_the_cache_the_slots_or_the_protocol(
    strategy: RoutingStrategy, data: st.DataObject
) -> None:
    bound, size = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    buffer = StalenessBuffer(bound=bound, batch_size=size, next_buffer=2)
    reserved = []
    for n in range(data.draw(st.integers(0, 4))):
        version = data.draw(st.integers(0, 2))
        if buffer.can_reserve(version):
            buffer.reserve(f"r{n}", version)
            reserved.append((f"r{n}", version))
    instances = [
        view(
            f"i{n}",
            data.draw(st.integers(0, 2)),
            running=(running := data.draw(st.integers(0, 4))),
            kv_tokens=running * data.draw(st.integers(1, 40)),
            kv_capacity=100,
            max_running=6,
        )
        for n in range(data.draw(st.integers(1, 4)))
    ]
    lengths = st.integers(1, 60)
    items = [(f"{g}-m{m}", g, v, data.draw(lengths)) for g, v in reserved for m in range(2)]
    items += [(f"n{n}-m{m}", f"n{n}", None, data.draw(lengths)) for n in range(4) for m in range(2)]
    snapshot = picture(
        buffer, instances, waiting(*items), newest=2, expected_held=data.draw(st.integers(1, 50))
    )
    state = state_of(snapshot)
    strategy.route(state)
    assert len({name for name, _ in routes(state)}) == len(routes(state))
    load = {name: [v.snapshot.running, v.snapshot.kv_tokens] for name, v in snapshot.instances.items()}
    for command in state.commands:
        assert isinstance(command, Route)
        version = snapshot.instances[command.instance].snapshot.version
        assert version >= command.min_version
        if command.admission is not None and command.admission.kind == "reserve":
            buffer.reserve(command.group_id, command.admission.version)  # raises where it may not
        elif command.admission is not None:
            buffer.lower(command.group_id, command.admission.version)
        count, tokens = load[command.instance]
        load[command.instance] = [count + 1, tokens + command.length]
        assert count + 1 <= 6
        assert count == 0 or tokens + command.length + count + 1 <= 100
