"""When an instance pulls; expected pulls worked out by hand."""

from __future__ import annotations

from pictures import picture, pulls, state_of, view, waiting

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.routing import WaterfallRouting
from staleflow.coordination.speculative import SpeculativeState
from staleflow.coordination.synchronization import (
    BarrierSynchronization,
    NaiveSynchronization,
    SelectiveSynchronization,
    SynchronizationStrategy,
)
from staleflow.protocol.buffer import StalenessBuffer

FLAT = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, prefill=0.001, pull=1.0)
"""A step takes 10 ms whatever runs: T = 100 n."""


def synchronized(strategy: SynchronizationStrategy, state: SpeculativeState) -> list[str]:
    strategy.synchronize(state)
    return pulls(state)


def strict_buffer(next_buffer: int = 1) -> StalenessBuffer:
    """η = 0: only the newest version may start anything."""
    return StalenessBuffer(bound=0, batch_size=4, next_buffer=next_buffer)


FRESH = [(f"m{i}", f"g{i}", None, 10) for i in range(4)]


def test_naive_pulls_everywhere_as_soon_as_there_is_something_newer() -> None:
    state = state_of(picture(strict_buffer(), [view("i0", 0, running=3), view("i1", 1)], newest=1))
    assert synchronized(NaiveSynchronization(), state) == ["i0"]


def test_barrier_pulls_everywhere_or_nowhere() -> None:
    idle = [view("i0", 0), view("i1", 0)]
    state = state_of(picture(strict_buffer(), idle, newest=1))
    assert synchronized(BarrierSynchronization(), state) == ["i0", "i1"]
    state = state_of(picture(strict_buffer(), [*idle, view("i2", 0, running=1)], newest=1))
    assert synchronized(BarrierSynchronization(), state) == []
    reserved = StalenessBuffer(bound=1, batch_size=4, next_buffer=1)
    reserved.reserve("g", 0)
    assert synchronized(BarrierSynchronization(), state_of(picture(reserved, idle, newest=1))) == []


def test_nothing_pulls_when_nothing_waits() -> None:
    state = state_of(picture(strict_buffer(), [view("i0", 0)], newest=1))
    assert synchronized(SelectiveSynchronization(), state) == []


def test_an_idle_instance_pulls_whenever_something_waits_for_it() -> None:
    state = state_of(picture(strict_buffer(), [view("i0", 0)], waiting(FRESH[0]), newest=1, costs=FLAT))
    assert synchronized(SelectiveSynchronization(), state) == ["i0"]


def test_a_busy_instance_pulls_if_what_it_unlocks_exceeds_what_it_stops() -> None:
    """One runs (100 tokens/s) and three may be added: 300 tokens/s for 20 steps of 10 ms are 60 tokens.

    The pull stops 100 tokens/s for 1 s and 0.001 s a token of KV: with a pull of 0.1 s and 100 tokens that is
    100 * 0.2 = 20 tokens, with one of 1 s it is 110.
    """
    items = waiting(*FRESH[:3])
    busy = [view("i0", 0, running=1, kv_tokens=100)]
    cheap = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, prefill=0.001, pull=0.1)
    for costs, expected in ((cheap, ["i0"]), (FLAT, [])):
        state = state_of(picture(strict_buffer(), busy, items, newest=1, costs=costs))
        assert synchronized(SelectiveSynchronization(), state) == expected


def test_keeping_the_kv_makes_a_pull_cheaper() -> None:
    """As above, with 600 tokens: 100 * (0.1 + 0.6) = 70 tokens lost with the prefill, 10 without."""
    items = waiting(*FRESH[:3])
    busy = [view("i0", 0, running=1, kv_tokens=600)]
    costs = CostModel(k1=0.0, k2=0.01, k3=0.0, k4=0.0, prefill=0.001, pull=0.1)
    for recompute, expected in ((True, []), (False, ["i0"])):
        state = state_of(picture(strict_buffer(), busy, items, newest=1, costs=costs))
        assert synchronized(SelectiveSynchronization(recompute=recompute), state) == expected


def test_no_more_instances_pull_than_the_waiting_trajectories_need() -> None:
    """Each instance holds 64: one pull is enough for four, and none is needed where i2 has room already."""
    idle = [view("i0", 0), view("i1", 0)]
    items = waiting(*FRESH)
    state = state_of(picture(strict_buffer(), idle, items, newest=1, costs=FLAT))
    assert synchronized(SelectiveSynchronization(mu=0.0), state) == ["i0"]
    state = state_of(picture(strict_buffer(), [*idle, view("i2", 1)], items, newest=1, costs=FLAT))
    assert synchronized(SelectiveSynchronization(mu=0.0), state) == []


def test_a_version_that_is_still_admissible_is_not_given_up() -> None:
    """η = 2: groups may start under the old version as well, so a busy instance has no reason to stop."""
    buffer = StalenessBuffer(bound=2, batch_size=4, next_buffer=1)
    busy = [view("i0", 0, running=1, kv_tokens=100, max_running=4)]
    state = state_of(picture(buffer, busy, waiting(*FRESH), newest=1, costs=FLAT))
    assert synchronized(SelectiveSynchronization(mu=0.0), state) == []


def test_an_instance_whose_pull_was_refused_at_the_barrier_pulls_again_while_its_batch_waits() -> None:
    """F36: else the batch, reserved at a version that no instance has, would wait for ever."""
    buffer = StalenessBuffer(bound=1, batch_size=1, next_buffer=2)
    buffer.reserve("g", 2)
    items = waiting(("m", "g", 2, 10))
    state = state_of(picture(buffer, [view("i0", 1), view("i1", 2)], items, newest=2))
    assert synchronized(BarrierSynchronization(), state) == ["i0"]
    ahead = [view("i0", 2), view("i1", 2)]
    assert synchronized(BarrierSynchronization(), state_of(picture(buffer, ahead, items, newest=3))) == []


def test_an_instance_behind_the_barrier_pulls_for_a_group_that_it_cannot_start_and_no_other_can() -> None:
    """Batch 2 of η = 1: one group is complete, one was filtered, and whoever could replace it is gone."""
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=2)
    buffer.reserve("g", 1)
    buffer.occupy("g")
    items = waiting(("m", "fresh", None, 10))
    behind = picture(buffer, [view("i0", 0)], items, newest=1)
    assert synchronized(BarrierSynchronization(), state_of(behind)) == ["i0"]
    with_another = picture(buffer, [view("i0", 0), view("i1", 1, running=1)], items, newest=1)
    assert synchronized(BarrierSynchronization(), state_of(with_another)) == []
    whole_batch_is_there = state_of(behind, fresh_groups=0)
    assert synchronized(BarrierSynchronization(), whole_batch_is_there) == []


def test_an_idle_instance_pulls_for_a_long_one_that_routing_found_no_room_for_elsewhere() -> None:
    """By typical length, 10, i0 has room for two more; but 20 + 30 tokens and one more for each exceed 50."""
    buffer = StalenessBuffer(bound=0, batch_size=1, next_buffer=1)
    instances = [view("i0", 1, running=1, kv_tokens=20, kv_capacity=50), view("i1", 0)]
    state = state_of(picture(buffer, instances, waiting(("long", "g", None, 30)), newest=1))
    strategy = SelectiveSynchronization()
    assert synchronized(strategy, state) == []
    WaterfallRouting().route(state)
    assert state.commands == []
    assert strategy.after_routing(state)
    assert pulls(state) == ["i1"]
