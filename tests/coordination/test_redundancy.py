"""Surplus members and spare groups, worked out by hand."""

from __future__ import annotations

import random

import pytest
from by_hand import Hand

from staleflow.coordination.actions import Abort, Discard, DrawGroups, Finish, Train
from staleflow.coordination.stragglers import Left, last_blocking_offset, plan_swaps
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Consume, Occupy, Promote, Release, Reserve, Swap
from staleflow.training.filtering import is_uninformative

# Surplus members --------------------------------------------------------------------------------------------


def test_the_first_rewarded_members_are_kept_and_the_others_are_aborted_at_once() -> None:
    hand = Hand(batch_size=1, group_size=2)
    hand.draw("a", members=4)
    hand.start("a")
    hand.reward("a3", raw=0.0)
    assert hand.take(Abort) == []
    hand.reward("a1")
    assert [c.trajectory_id for c in hand.take(Abort)] == ["a0", "a2"]
    assert [(d.trajectory_ids, d.reason) for d in hand.take(Discard)] == [(("a0", "a2"), "aborted")]
    assert [t.groups for t in hand.take(Train)] == [(("a", ("a1", "a3")),)]


def test_a_failed_member_is_not_kept_as_long_as_another_may_come() -> None:
    """F25: two of three are kept; a0 failed, so the group waits for a2 and trains on no masked one."""
    hand = Hand(batch_size=1, group_size=2)
    hand.draw("a", members=3)
    hand.start("a")
    hand.reward("a0", usable=False)
    hand.reward("a1")
    assert hand.take(Occupy) == []
    hand.reward("a2")
    assert [d.trajectory_ids for d in hand.take(Discard)] == [("a0",)]
    assert [t.groups for t in hand.take(Train)] == [(("a", ("a1", "a2")),)]


def test_failed_members_fill_up_when_no_other_can_come_and_the_filter_sees_usable_ones_only() -> None:
    """F25: one usable reward of 1 and two failures: no pair to compare, so the group is filtered, not trained
    as if the failures had scored 0."""
    hand = Hand(batch_size=1, group_size=2, group_filter=is_uninformative)
    hand.draw("a", "b", members=3)
    hand.start("a")
    hand.reward("a0", "a2", raw=0.0, usable=False)
    hand.reward("a1", raw=1.0)
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("a", "filtered")]
    assert [(d.trajectory_ids, d.reason) for d in hand.take(Discard)] == [
        (("a2",), "aborted"),
        (("a0", "a1"), "filtered"),
    ]


def test_without_a_filter_a_failed_member_is_trained_on_masked_beside_the_usable_ones() -> None:
    hand = Hand(batch_size=1, group_size=2)
    hand.draw("a", members=3)
    hand.start("a")
    hand.reward("a0", "a2", usable=False)
    hand.reward("a1")
    assert [t.groups for t in hand.take(Train)] == [(("a", ("a0", "a1")),)]


def test_a_group_of_failures_is_released_as_failed_with_or_without_surplus() -> None:
    hand = Hand(batch_size=1, group_size=2)
    hand.draw("a", members=3)
    hand.start("a")
    hand.reward("a0", "a1", "a2", usable=False)
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("a", "failed")]
    assert hand.take(Occupy) == []


# Drawing ----------------------------------------------------------------------------------------------------


def test_as_many_groups_more_are_drawn_as_may_be_spare_and_no_firm_place_goes_beyond_the_last_step() -> None:
    hand = Hand(bound=1, batch_size=3, spares=2, steps=1)
    hand.cycle()
    assert [d.count for d in hand.take(DrawGroups)] == [1 * 3 + 2]
    hand.draw("a", "b", "c", "d", "e")
    hand.start("a", "b", "c")
    assert hand.control.view.reservable == 0
    assert hand.control.view.spares_free == 2
    hand.start("d", spare=True)
    assert (hand.control.view.reservable, hand.control.view.spares_free) == (0, 1)
    assert hand.take(Promote) == [], "there is a place in the buffer, but no step that needs it"


# Spare groups -----------------------------------------------------------------------------------------------


def test_a_firm_place_that_becomes_free_goes_to_the_spare_reserved_first() -> None:
    hand = Hand(bound=1, batch_size=1, spares=2, group_filter=is_uninformative, group_size=2)
    hand.draw("a", "b", "c", "d", members=2)
    hand.start("a", "b")
    hand.start("c", "d", spare=True)
    hand.reward("a0", "a1", raw=1.0)  # equal: filtered
    assert [p.group for p in hand.take(Promote)] == ["c"]
    assert not hand.control._buffer.entry("c").spare
    assert hand.control._buffer.entry("d").spare


def test_consuming_makes_room_for_spares_before_new_groups_and_what_is_too_old_expires() -> None:
    """Bound 0: every spare is of the version consumed, so it expires, is aborted, and comes again."""
    hand = Hand(bound=0, batch_size=1, spares=1)
    hand.draw("a", "b")
    hand.start("a")
    hand.start("b", spare=True)
    hand.exhaust()
    hand.reward("a0")
    assert [c.buffer for c in hand.take(Consume)] == [0]
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("b", "expired")]
    assert [c.trajectory_id for c in hand.take(Abort)] == ["b0"]
    assert [(d.trajectory_ids, d.reason) for d in hand.take(Discard)] == [(("b0",), "expired")]
    assert len(hand.control._buffer) == 0
    hand.push(1)
    assert [d.count for d in hand.take(DrawGroups)] == [2], "the prompt of b is to be had again"
    assert hand.control.view.finished is None


def test_with_a_bound_of_1_the_spare_of_the_step_before_is_promoted() -> None:
    hand = Hand(bound=1, batch_size=1, spares=1)
    hand.draw("a", "b", "c")
    hand.start("a", "b")
    hand.start("c", spare=True)
    hand.reward("a0")
    # c has d = 1, as b has; buffer 1 holds one of them, so c is not placeable next to b
    assert hand.take(Promote) == []
    hand.reward("b0")
    hand.push(1)
    assert [c.buffer for c in hand.take(Consume)] == [0, 1]
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("c", "expired")]
    hand.push(2)
    hand.draw("d", "e", "f")
    hand.start("d", "e")
    hand.start("f", spare=True)
    hand.reward("d0")
    hand.push(3)
    assert len(hand.take(Consume)) == 1
    assert hand.take(Promote) == []


def test_a_finished_spare_takes_the_place_of_the_group_with_most_left_and_training_goes_on() -> None:
    """b has one member unfinished, c two: c goes, and expires with the step that goes on without it."""
    hand = Hand(bound=0, batch_size=3, spares=1, group_size=2)
    hand.draw("a", "b", "c", "d", members=2)
    hand.start("a", "b", "c")
    hand.start("d", spare=True)
    hand.reward("a0", "a1", "b0", "d0", "d1")
    assert hand.take(Swap) == [], "b is not finished either: a swap would not let training go on"
    hand.reward("b1")
    assert hand.take(Swap) == [Swap(spare="d", firm="c")]
    (consumed,) = hand.take(Consume)
    assert [g.group for g in consumed.groups] == ["a", "b", "d"]
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("c", "expired")]
    assert [c.trajectory_id for c in hand.take(Abort)] == ["c0", "c1"]


def test_of_groups_with_as_many_members_left_the_one_with_fewer_tokens_goes() -> None:
    hand = Hand(bound=1, batch_size=1, spares=1)
    hand.draw("a", "b", "c")
    hand.start("a", "b")
    hand.report(grown={"a0": 3, "b0": 7})
    hand.start("c", spare=True)
    hand.reward("c0")
    assert hand.take(Swap) == [Swap(spare="c", firm="a")]


def test_a_swapped_out_group_goes_on_as_a_spare_and_is_promoted_when_there_is_room() -> None:
    """Bound 1, batches of 1: a and b are firm at version 0, c spare. c is trained in the place of a."""
    hand = Hand(bound=1, batch_size=1, spares=1)
    hand.draw("a", "b", "c", "d")
    hand.start("a", "b")
    hand.report(grown={"b0": 9})
    hand.start("c", spare=True)
    hand.reward("c0")
    assert hand.take(Swap) == [Swap(spare="c", firm="a")]
    assert [g.group for c in hand.take(Consume) for g in c.groups] == ["c"]
    assert hand.control._buffer.entry("a").spare, "b takes the one place of buffer 1"
    hand.reward("b0")
    hand.push(1)
    assert [g.group for c in hand.take(Consume) for g in c.groups] == ["b"]
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("a", "expired")]


def test_no_swap_while_the_trainer_is_busy_and_one_as_soon_as_it_is_idle() -> None:
    hand = Hand(bound=1, batch_size=1, spares=1)
    hand.draw("a", "b", "c")
    hand.start("a", "b")
    hand.reward("a0")
    assert len(hand.take(Consume)) == 1  # the trainer works on step 0
    hand.start("c", spare=True)
    assert hand.control._buffer.entry("c").spare
    hand.reward("c0")
    assert hand.take(Swap) == []
    hand.push(1)
    assert hand.take(Swap) == [Swap(spare="c", firm="b")]
    assert [g.group for c in hand.take(Consume) for g in c.groups] == ["c"]


def test_a_group_whose_prompt_expired_before_is_not_swapped_out_again() -> None:
    hand = Hand(bound=0, batch_size=1, spares=1)
    hand.draw("a", redrawn=True)
    hand.draw("b")
    hand.start("a")
    hand.start("b", spare=True)
    hand.reward("b0")
    assert hand.take(Swap) == []
    hand.reward("a0")
    assert [g.group for c in hand.take(Consume) for g in c.groups] == ["a"]


def test_a_spare_that_is_filtered_leaves_its_spare_place() -> None:
    hand = Hand(bound=0, batch_size=1, spares=1, group_size=2, group_filter=is_uninformative)
    hand.draw("a", "b", "c", members=2)
    hand.start("a")
    hand.start("b", spare=True)
    hand.reward("b0", "b1", raw=0.0)
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("b", "filtered")]
    hand.start("c", spare=True)
    assert [r.group for r in hand.take(Reserve) if r.spare] == ["b", "c"]


def test_after_the_last_batch_no_spare_goes_on() -> None:
    """Bound 1: b could be trained in buffer 1, but there is no step 1."""
    hand = Hand(bound=1, batch_size=1, spares=1, steps=1)
    hand.draw("a", "b")
    hand.start("a")
    hand.start("b", spare=True)
    hand.reward("a0")
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("b", "expired")]
    assert [c.trajectory_id for c in hand.take(Abort)] == ["b0"]
    hand.take(DrawGroups)
    hand.push(1)
    assert hand.take(DrawGroups) == []
    assert [f.reason for f in hand.take(Finish)] == ["completed"]
    assert list(hand.control._trajectories.members()) == []


def test_the_prompt_of_an_expired_spare_makes_the_last_smaller_batch() -> None:
    """Batches of 3, four prompts, bound 0: three firm and one spare, which is alone in the end."""
    hand = Hand(bound=0, batch_size=3, spares=1)
    hand.draw("a", "b", "c", "d")
    hand.start("a", "b", "c")
    hand.start("d", spare=True)
    hand.exhaust()
    hand.reward("a0", "b0", "c0")
    assert [(r.group, r.reason) for r in hand.take(Release)] == [("d", "expired")]
    hand.take(DrawGroups)
    hand.push(1)
    assert [d.count for d in hand.take(DrawGroups)] == [4]
    hand.draw("e", redrawn=True)
    hand.exhaust()
    hand.start("e")
    hand.reward("e0")
    final = hand.take(Consume)[-1]
    assert (final.final, [g.group for g in final.groups]) == (True, ["e"])
    hand.push(2)
    assert [f.reason for f in hand.take(Finish)] == ["exhausted"]


# The rule by itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_reserved_entry_blocks_exactly_while_consume_is_illegal(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        bound, size = rng.randrange(4), rng.randrange(1, 4)
        buffer = StalenessBuffer(bound=bound, batch_size=size, next_buffer=bound)
        for group in map(str, range(rng.randrange(12))):
            version = rng.randrange(bound + 1)
            if buffer.can_reserve(version):
                buffer.reserve(group, version)
                if rng.random() < 0.6:
                    buffer.occupy(group)
        reserved, occupied = zip(*buffer.by_deadline(), strict=True)
        limit = last_blocking_offset(reserved, occupied, size)
        assert (limit is None) == buffer.can_consume()
        early = [e for e in buffer.unfinished() if limit is not None and e.deadline <= bound + limit]
        for entry in buffer.unfinished():
            if limit is not None and limit < bound and entry not in early:
                buffer.occupy(entry.group)
        if limit is not None and limit < bound:
            assert not buffer.can_consume(), "none but the early ones stand in the way"


@pytest.mark.parametrize("seed", range(20))
def test_swaps_are_legal_and_let_training_go_on_or_there_are_none(seed: int) -> None:
    rng = random.Random(seed)
    useful = 0
    for _ in range(200):
        bound, size = rng.randrange(4), rng.randrange(1, 4)
        buffer = StalenessBuffer(bound=bound, batch_size=size, spare_limit=4, next_buffer=bound)
        for group in map(str, range(16)):
            version, spare = rng.randrange(bound + 1), rng.random() < 0.3
            if buffer.can_reserve(version, spare):
                buffer.reserve(group, version, spare)
                if rng.random() < (0.8 if spare else 0.5):
                    buffer.occupy(group)
        swaps = plan_swaps(buffer, lambda group: Left(unfinished=1, tokens=int(group)))
        if buffer.can_consume():
            assert swaps == []
        for spare, firm in swaps:
            buffer.swap(spare, firm)  # raises when it is not legal
        if swaps:
            useful += 1
            assert buffer.can_consume()
    assert useful > 5
