"""The last few trajectories that training waits for, worked out by hand."""

from __future__ import annotations

import pytest
from by_hand import MEAN, Hand

from staleflow.coordination.actions import Abort, Interrupt, Resample, Score, Train, Truncate
from staleflow.coordination.events import WaitingExternal
from staleflow.coordination.stragglers import StragglerAction, StragglerRule, waited_for
from staleflow.protocol.buffer import StalenessBuffer

LONG = MEAN + 5


def one_left(action: StragglerAction, *, at_most: int = 1, length: int = LONG, **settings: int) -> Hand:
    """A full buffer of two groups, a0 done, b0 with `length` tokens: Stuck."""
    hand = Hand(rule=StragglerRule(action=action, at_most=at_most), batch_size=2, **settings)
    hand.draw("a", "b")
    hand.start("a", "b")
    hand.reward("a0")
    hand.report(grown={"b0": length})
    return hand


def acted(hand: Hand) -> bool:
    hand.cycle()
    return bool(hand.take(Abort) or hand.take(Interrupt) or hand.take(Truncate) or hand.take(Resample))


def test_by_default_it_is_waited() -> None:
    assert not acted(one_left("wait"))
    hand = Hand()
    hand.draw("a", "b")
    hand.start("a", "b")
    hand.report(grown={"a0": 1000, "b0": 1000})
    assert not acted(hand)


# Retry ------------------------------------------------------------------------------------------------------


def test_retry_aborts_the_straggler_and_samples_anew_under_a_new_id() -> None:
    hand = one_left("retry")
    hand.cycle()
    assert [c.trajectory_id for c in hand.take(Abort)] == ["b0"]
    assert [(r.trajectory_id, r.new_id) for r in hand.take(Resample)] == [("b0", "b0-r1")]
    assert hand.control._trajectories.find("b0") is None
    assert hand.control._trajectories.group("b").members == ("b0-r1",)
    assert hand.control._buffer.entry("b").version == 0, "the reservation stays"
    hand.route("b0-r1")
    hand.reward("b0-r1")
    assert [t.groups for t in hand.take(Train)] == [(("a", ("a0",)), ("b", ("b0-r1",)))]


def test_a_trajectory_is_sampled_anew_once_only() -> None:
    hand = one_left("retry")
    hand.cycle()
    hand.route("b0-r1")
    hand.report(grown={"b0-r1": 10 * LONG})
    assert len(hand.take(Resample)) == len(hand.take(Abort)) == 1
    assert not acted(hand)


def test_a_straggler_that_waits_in_the_trajectory_server_is_sampled_anew_without_an_abort() -> None:
    hand = one_left("retry", length=MEAN - 1)
    assert not acted(hand)
    hand.report(finished={})
    hand.control._dispatch.interrupt(hand.control._trajectories.member("b0"), "i0", "migration")
    hand.control._trajectories.member("b0").length = 4 + LONG
    hand.report()
    hand.cycle()
    assert hand.take(Abort) == []
    assert [r.new_id for r in hand.take(Resample)] == ["b0-r1"]


# Truncate ---------------------------------------------------------------------------------------------------


def test_truncate_interrupts_the_straggler_and_trains_on_what_there_is() -> None:
    hand = one_left("truncate")
    hand.take(Score)
    hand.cycle()
    assert [c.trajectory_id for c in hand.take(Interrupt)] == ["b0"]
    hand.cycle()
    assert hand.take(Interrupt) == [], "one Interrupt is under way"
    assert hand.take(Truncate) == []
    hand.report()  # it has come back
    hand.cycle()
    assert [t.trajectory_id for t in hand.take(Truncate)] == ["b0"]
    assert [s.trajectory_id for s in hand.take(Score)] == ["b0"]
    hand.reward("b0")
    assert len(hand.take(Train)) == 1


def test_a_straggler_that_comes_back_when_training_goes_on_is_not_cut() -> None:
    """Two of three groups are one too few; c's straggler returns after b's has finished."""
    hand = Hand(rule=StragglerRule(action="truncate", at_most=2), bound=1, batch_size=2)
    hand.draw("a", "b", "c", "d")
    hand.start("a", "b", "c", "d")
    hand.report(grown={"b0": LONG, "c0": LONG, "d0": LONG})
    hand.reward("a0")
    hand.cycle()
    assert [c.trajectory_id for c in hand.take(Interrupt)] == ["b0"], "of b, c and d the earliest will do"
    hand.report(finished={"c0": LONG})
    hand.reward("c0")
    hand.report()
    assert not acted(hand)
    assert len(hand.control._trajectories.pending) == 1, "b0 is routed again"


# When ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_a_trajectory_shorter_than_the_mean_response_is_no_straggler(action: StragglerAction) -> None:
    assert not acted(one_left(action, length=MEAN - 1))
    assert acted(one_left(action, length=MEAN))


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_nothing_is_done_while_another_group_may_start(action: StragglerAction) -> None:
    """Bound 1 leaves two places free: the buffer is Waiting, not Stuck."""
    assert not acted(one_left(action, bound=1))


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_nothing_is_done_while_the_trainer_works(action: StragglerAction) -> None:
    hand = Hand(rule=StragglerRule(action=action), bound=1, batch_size=1)
    hand.draw("a", "b", "c")
    hand.start("a", "b")
    hand.reward("a0")
    hand.report(grown={"b0": LONG})
    assert not acted(hand)
    hand.push(1)
    hand.start("c")
    assert acted(hand)


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_no_more_than_at_most_may_be_unfinished(action: StragglerAction) -> None:
    """Four members of one group are missing."""
    for at_most, expected in ((3, False), (4, True)):
        hand = Hand(rule=StragglerRule(action=action, at_most=at_most), batch_size=1, group_size=5)
        hand.draw("a", members=5)
        hand.start("a")
        hand.report(grown={f"a{m}": LONG for m in range(5)})
        hand.reward("a4")
        assert acted(hand) is expected


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_what_is_being_scored_or_waits_for_its_environment_is_left_alone(action: StragglerAction) -> None:
    hand = one_left(action)
    hand.report(finished={"b0": LONG})
    assert not acted(hand)
    hand.tell(WaitingExternal(trajectory_id="b0", limit_s=100))
    assert not acted(hand)


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_at_the_end_of_the_source_the_last_batch_may_have_stragglers(action: StragglerAction) -> None:
    """A batch of 3 and two prompts: there is room, and nothing to fill it with."""
    hand = Hand(rule=StragglerRule(action=action), batch_size=3)
    hand.draw("a", "b")
    hand.start("a", "b")
    hand.reward("a0")
    hand.report(grown={"b0": LONG})
    assert not acted(hand)
    hand.exhaust()
    assert acted(hand)


@pytest.mark.parametrize("action", ["retry", "truncate"])
def test_in_the_last_step_there_is_room_that_no_step_needs(action: StragglerAction) -> None:
    assert acted(one_left(action, bound=1, steps=1))


# Whom training waits for ------------------------------------------------------------------------------------


def test_training_waits_for_the_groups_that_are_done_soonest() -> None:
    """Batches of 2, c = 1, bound 1: x of deadline 1 must be done, y and z of deadline 2 need not."""
    buffer = StalenessBuffer(bound=1, batch_size=2, next_buffer=1)
    buffer.reserve("x", 0)
    for group in ("w", "y", "z"):
        buffer.reserve(group, 1)
    buffer.occupy("w")
    left = {"x": 3, "y": 1, "z": 2}
    assert [e.group for e in waited_for(buffer, left.__getitem__, final=False)] == ["x"]
    assert [e.group for e in waited_for(buffer, left.__getitem__, final=True)] == ["x", "y", "z"]
    buffer.release("x")
    assert [e.group for e in waited_for(buffer, left.__getitem__, final=False)] == ["y"]
