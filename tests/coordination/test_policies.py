"""Whole policies: what each admits, and when each pulls."""

from __future__ import annotations

import pytest
from pictures import picture, view, waiting

from staleflow.coordination.actions import Pull, Route
from staleflow.coordination.policies import (
    POLICIES,
    PolicySettings,
    batches_ahead,
    build_coordinator,
    effective_bound,
    one_batch,
)
from staleflow.coordination.speculative import SpeculativeState
from staleflow.protocol.buffer import StalenessBuffer

SETTINGS = PolicySettings(mu=0.0, max_per_instance=8)


def started(policy: str, buffer: StalenessBuffer, version: int, newest: int, groups: int = 9) -> list[str]:
    """Which of the fresh groups start on one empty instance."""
    items = waiting(*[(f"m{i}", f"g{i}", None, 10) for i in range(groups)])
    snapshot = picture(buffer, [view("i0", version)], items, newest=newest)
    commands = build_coordinator(policy, SETTINGS).step(snapshot).commands
    return [c.group_id for c in commands if isinstance(c, Route)]


def test_batches_ahead_counts_consumed_and_reserved_together_but_not_released() -> None:
    """η = 1, batch 2, v = 3: (3 + 1 + 1) * 2 = 10 in all; 3 batches are consumed, so 4 may be there."""
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=3)
    assert batches_ahead(picture(buffer, [], newest=3)) == 4
    buffer.reserve("a", 3)
    assert batches_ahead(picture(buffer, [], newest=3)) == 3
    buffer.release("a")
    assert batches_ahead(picture(buffer, [], newest=3)) == 4


def test_batches_ahead_while_the_trainer_works() -> None:
    """The same, batch 3 just handed out: 4 are consumed, one batch of 2 may start under version 3."""
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=4)
    assert batches_ahead(picture(buffer, [], newest=3)) == 2


def test_one_batch_replaces_what_was_released_and_no_more() -> None:
    buffer = StalenessBuffer(bound=1, batch_size=3)
    assert one_batch(picture(buffer, [], newest=0)) == 3
    for group in "abc":
        buffer.reserve(group, 0)
    assert one_batch(picture(buffer, [], newest=0)) == 0
    buffer.release("b")
    assert one_batch(picture(buffer, [], newest=0)) == 1


@pytest.mark.parametrize(
    ("policy", "groups"), [("staleflow", 4), ("strict_queue", 4), ("strict", 4), ("one_step", 2)]
)
def test_how_far_each_policy_runs_ahead_under_a_bound_of_one(policy: str, groups: int) -> None:
    """Batch 2, nothing under way: two batches, or one at a time."""
    assert len(started(policy, StalenessBuffer(bound=1, batch_size=2), 0, 0)) == groups


def test_sync_generates_a_batch_and_waits_for_its_training() -> None:
    assert effective_bound("sync", 3) == 0
    assert len(started("sync", StalenessBuffer(bound=0, batch_size=2), 0, 0)) == 2
    # batch 0 is being trained on: its weights are still the newest
    assert started("sync", StalenessBuffer(bound=0, batch_size=2, next_buffer=1), 0, 0) == []


def test_one_step_generates_the_next_batch_under_the_weights_of_the_step_in_training() -> None:
    assert (effective_bound("one_step", 3), effective_bound("one_step", 1)) == (1, 1)
    assert len(started("one_step", StalenessBuffer(bound=1, batch_size=2, next_buffer=1), 0, 0)) == 2


def test_one_step_does_not_pull_in_the_middle_of_a_batch() -> None:
    """One group of the batch is reserved, the other was released: its replacement runs under old weights."""
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=1)
    buffer.reserve("a", 0)
    items = waiting(("m", "g", None, 10))
    snapshot = picture(buffer, [view("i0", 0), view("i1", 0)], items, newest=1)
    commands = build_coordinator("one_step", SETTINGS).step(snapshot).commands
    assert [type(c).__name__ for c in commands] == ["Route"]


@pytest.mark.parametrize("policy", ["strict", "strict_queue"])
def test_strict_policies_update_all_instances_at_once(policy: str) -> None:
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=1)
    instances = [view(f"i{n}", 0, running=n, kv_tokens=10 * n) for n in range(3)]
    commands = build_coordinator(policy, SETTINGS).step(picture(buffer, instances, newest=1)).commands
    assert [c.instance for c in commands if isinstance(c, Pull)] == ["i0", "i1", "i2"]


def test_each_strategy_of_staleflow_can_be_replaced_by_its_naive_variant() -> None:
    """Naive synchronization pulls though nothing waits; naive routing takes the fewest, not the best gain."""
    buffer = StalenessBuffer(bound=0, batch_size=2, next_buffer=1)
    behind = picture(buffer, [view("i0", 0)], newest=1)
    assert build_coordinator("staleflow", SETTINGS).step(behind).commands == ()
    naive = PolicySettings(synchronization="naive")
    assert len(build_coordinator("staleflow", naive).step(behind).commands) == 1
    instances = [view("long", 1, running=1, kv_tokens=100), view("many", 1, running=2, kv_tokens=20)]
    work = picture(buffer, instances, waiting(("a", "g", None, 10)), newest=1)
    targets = {
        strategy: build_coordinator("staleflow", PolicySettings(mu=0.0, routing=strategy)).step(work)
        for strategy in ("waterfall", "naive")
    }
    # 2/0.12 - 1/0.11 = 7.6 against 3/0.04 - 2/0.03 = 8.3
    assert [d.commands[0].instance for d in targets.values()] == ["many", "long"]


class LastInstance:
    """A routing strategy from outside: everything goes to the instance named last."""

    made = 0

    def __init__(self) -> None:
        LastInstance.made += 1

    def route(self, state: SpeculativeState) -> None:
        for item in state.snapshot.pending:
            state.route(item, max(state.instances), "it is the last")


def test_a_strategy_of_the_callers_own_is_made_anew_for_each_coordinator() -> None:
    buffer = StalenessBuffer(bound=0, batch_size=2, next_buffer=1)
    work = picture(buffer, [view(f"i{n}", 1) for n in range(3)], waiting(("a", "g", None, 10)), newest=1)
    settings = PolicySettings(routing=LastInstance)
    for made in (1, 2):
        commands = build_coordinator("staleflow", settings).step(work).commands
        assert [c.instance for c in commands] == ["i2"]
        assert LastInstance.made == made


@pytest.mark.parametrize("policy", POLICIES)
def test_every_command_says_why(policy: str) -> None:
    buffer = StalenessBuffer(bound=effective_bound(policy, 1), batch_size=2, next_buffer=1)
    snapshot = picture(buffer, [view("i0", 0)], waiting(("a", "g", None, 10)), newest=1)
    commands = build_coordinator(policy, SETTINGS).step(snapshot).commands
    assert commands
    assert all(c.reason for c in commands)
