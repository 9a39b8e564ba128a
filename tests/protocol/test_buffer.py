"""The staleness buffer by worked examples, and each illegal transition, which changes nothing."""

import pytest

from staleflow.errors import ProtocolError
from staleflow.protocol import BufferState, StalenessBuffer


def make(bound=1, batch_size=2, spare_limit=0, next_buffer=0):
    return StalenessBuffer(
        bound=bound, batch_size=batch_size, spare_limit=spare_limit, next_buffer=next_buffer
    )


def fill(buffer, version, *groups, spare=False, occupied=False):
    for group in groups:
        buffer.reserve(group, version, spare)
        if occupied:
            buffer.occupy(group)


def names(consumed):
    return [entry.group for entry in consumed.entries]


def picture(buffer):
    """All that can be seen of a buffer."""
    entries = [buffer.entry(group) for group in buffer.groups()]
    return buffer.next_buffer, entries, buffer.counts(), buffer.placement(), buffer.state(), len(buffer)


# The order of training -------------------------------------------------------------------------------


def test_consume_takes_the_earliest_deadlines_then_the_earliest_reservations():
    buffer = make(bound=2, batch_size=2, next_buffer=2)
    fill(buffer, 2, "late")
    fill(buffer, 1, "second")
    fill(buffer, 1, "third")
    fill(buffer, 0, "first")
    for group in ("third", "late", "second", "first"):
        buffer.occupy(group)
    assert names(buffer.consume()) == ["first", "second"]
    assert names(buffer.consume()) == ["third", "late"]
    assert buffer.next_buffer == 4


def test_an_entry_says_what_it_is():
    buffer = make(bound=2, batch_size=2, next_buffer=3)
    buffer.reserve("a", 3)
    buffer.reserve("b", 2)
    buffer.lower("a", 1)
    entry = buffer.entry("a")
    assert (entry.version, entry.deadline, entry.order, entry.occupied, entry.spare) == (
        1,
        3,
        0,
        False,
        False,
    )
    assert buffer.groups() == ("a", "b")
    assert "a" in buffer
    assert "c" not in buffer


# The two traps of the design ---------------------------------------------------------------------------


def test_trap_unfinished_groups_of_the_next_deadline_stop_a_consume_that_would_starve_them():
    """bound 2, batch 2, c = 1: four unfinished groups with d = 2, two occupied with d = 3."""
    buffer = make(bound=2, batch_size=2, next_buffer=1)
    fill(buffer, 0, "u0", "u1", "u2", "u3")
    fill(buffer, 1, "o0", "o1", occupied=True)
    assert buffer.counts().as_tuple() == (0, 4, 2)
    assert not buffer.can_consume()
    assert buffer.state() == BufferState.STUCK
    buffer.occupy("u0")
    assert not buffer.can_consume()  # u0 and o0 would leave three groups with d = 2 for one batch
    buffer.occupy("u1")
    assert names(buffer.consume()) == ["u0", "u1"]


def test_trap_nothing_with_a_past_deadline_may_remain():
    buffer = make(bound=1, batch_size=2, next_buffer=1)
    fill(buffer, 0, "old")
    fill(buffer, 1, "o0", "o1", occupied=True)
    assert not buffer.can_consume()
    buffer.occupy("old")
    assert names(buffer.consume()) == ["old", "o0"]


# Faults that users reported ----------------------------------------------------------------------------


def test_after_a_resume_the_lead_is_still_bounded():
    """F1: a buffer resumed at step 40 admits (bound + 1) batches and no version out of bound."""
    buffer = make(bound=1, batch_size=2, next_buffer=40)
    assert not buffer.can_reserve(38)
    assert not buffer.can_reserve(0)
    for step in range(40, 60):
        while buffer.can_reserve(buffer.next_buffer):
            fill(buffer, buffer.next_buffer, f"{step}-{len(buffer)}", occupied=True)
        assert len(buffer) <= 4
        for entry in buffer.consume().entries:
            assert 0 <= step - entry.version <= 1


def test_finished_groups_do_not_age_past_the_bound_while_the_trainer_is_blocked():
    """F2: groups that wait in the queue are counted; whatever the time, the bound holds at consume."""
    buffer = make(bound=1, batch_size=2)
    fill(buffer, 0, "a", "b", "c", "d", occupied=True)
    assert not buffer.can_reserve(0)  # a fifth would be trained on in step 2 at the earliest
    assert [entry.deadline for entry in buffer.consume().entries] == [1, 1]
    assert not buffer.can_reserve(0)
    assert [entry.deadline for entry in buffer.consume().entries] == [1, 1]
    assert buffer.next_buffer == 2


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_the_largest_staleness_is_exactly_the_bound(bound):
    """F3: no off-by-one: the bound is reached and never passed."""
    buffer = make(bound=bound, batch_size=2)
    groups = (f"g{n}" for n in range(10_000))
    lags = set()
    for _ in range(12):
        while buffer.can_reserve(buffer.next_buffer):
            fill(buffer, buffer.next_buffer, next(groups), occupied=True)
        consumed = buffer.consume()
        lags |= {consumed.buffer - entry.version for entry in consumed.entries}
    assert max(lags) == bound
    assert min(lags) >= 0


def test_a_bound_of_0_generates_one_batch_a_version():
    """F4: bound 0 admits one whole batch, not none."""
    buffer = make(bound=0, batch_size=2)
    for step in range(3):
        assert buffer.state() == BufferState.WAITING
        fill(buffer, step, f"{step}a", f"{step}b")
        assert not buffer.can_reserve(step)
        assert buffer.state() == BufferState.STUCK
        buffer.occupy(f"{step}b")
        buffer.occupy(f"{step}a")
        assert buffer.state() == BufferState.READY
        assert names(buffer.consume()) == [f"{step}a", f"{step}b"]
        assert not buffer.can_reserve(step)  # nothing until the push of the next version


# Reserving ------------------------------------------------------------------------------------------------


def test_a_version_that_does_not_exist_yet_is_refused():
    buffer = make(next_buffer=3)
    assert not buffer.can_reserve(4)
    assert not buffer.can_reserve(4, spare=True)


def test_a_released_place_can_be_reserved_anew():
    buffer = make(bound=0, batch_size=1)
    fill(buffer, 0, "filtered")
    assert not buffer.can_reserve(0)
    buffer.release("filtered")
    assert buffer.can_reserve(0)
    assert len(buffer) == 0


def test_lowering_to_the_same_version_changes_nothing():
    buffer = make(next_buffer=1)
    fill(buffer, 1, "a")
    before = picture(buffer)
    buffer.lower("a", 1)
    assert picture(buffer) == before


# The last batch ----------------------------------------------------------------------------------------


def test_the_final_batch_takes_what_is_left():
    buffer = make(bound=1, batch_size=2)
    fill(buffer, 0, "a", "b", "c", occupied=True)
    assert names(buffer.consume(final=True)) == ["a", "b"]
    assert not buffer.can_consume()
    assert names(buffer.consume(final=True)) == ["c"]
    assert not buffer.can_consume(final=True)


def test_the_final_batch_waits_for_every_entry():
    buffer = make(bound=1, batch_size=2, spare_limit=1)
    fill(buffer, 0, "a", occupied=True)
    fill(buffer, 0, "b")
    assert not buffer.can_consume(final=True)
    buffer.occupy("b")
    fill(buffer, 0, "s", spare=True)
    assert not buffer.can_consume(final=True)
    buffer.release("s")
    assert buffer.can_consume(final=True)


def test_an_occupied_spare_that_is_gone_counts_no_more_towards_every_entry_occupied():
    buffer = make(bound=1, batch_size=1, spare_limit=2)
    fill(buffer, 0, "a", "b", occupied=True)
    fill(buffer, 0, "expires", "released", spare=True, occupied=True)
    buffer.release("released")
    buffer.consume()
    assert buffer.consume().expired == ("expires",)
    fill(buffer, 2, "done", occupied=True)
    fill(buffer, 2, "unfinished")
    assert not buffer.can_consume(final=True)


# Spares ------------------------------------------------------------------------------------------------


def test_spares_are_not_counted_up_to_their_limit():
    buffer = make(bound=0, batch_size=1, spare_limit=2)
    fill(buffer, 0, "firm")
    assert not buffer.can_reserve(0)
    fill(buffer, 0, "s0", "s1", spare=True)
    assert not buffer.can_reserve(0, spare=True)
    assert buffer.counts().total == 1


def test_an_occupied_spare_is_not_consumed_before_it_is_firm():
    buffer = make(bound=1, batch_size=1, spare_limit=1)
    fill(buffer, 0, "s", spare=True, occupied=True)
    assert not buffer.can_consume()
    buffer.promote("s")
    assert names(buffer.consume()) == ["s"]


def test_a_finished_spare_takes_the_place_of_an_unfinished_firm_group():
    buffer = make(bound=0, batch_size=1, spare_limit=1)
    fill(buffer, 0, "slow")
    fill(buffer, 0, "spare", spare=True, occupied=True)
    assert not buffer.can_promote("spare")  # the batch is full
    buffer.swap("spare", "slow")
    assert buffer.entry("slow").spare
    assert not buffer.entry("spare").spare
    consumed = buffer.consume()
    assert names(consumed) == ["spare"]
    assert consumed.expired == ("slow",)
    assert len(buffer) == 0


def test_a_swap_that_cannot_be_placed_is_refused():
    buffer = make(bound=1, batch_size=1, spare_limit=1, next_buffer=1)
    fill(buffer, 0, "old")
    fill(buffer, 1, "young")
    fill(buffer, 0, "spare", spare=True, occupied=True)
    assert not buffer.can_swap("spare", "young")  # two groups with d = 1 for one batch
    assert buffer.can_swap("spare", "old")


def test_spares_expire_when_their_deadline_is_past_and_no_sooner():
    buffer = make(bound=1, batch_size=1, spare_limit=3)
    fill(buffer, 0, "a", "b", occupied=True)
    fill(buffer, 0, "s0", "s1", spare=True)
    buffer.occupy("s0")
    assert buffer.consume().expired == ()
    fill(buffer, 1, "s2", spare=True)
    assert buffer.consume().expired == ("s0", "s1")
    assert buffer.groups() == ("s2",)
    assert not buffer.can_consume(final=True)
    buffer.promote("s2")
    assert buffer.next_buffer == 2


def test_a_lowered_spare_expires_by_its_lower_version():
    buffer = make(bound=1, batch_size=1, spare_limit=1)
    fill(buffer, 0, "a", occupied=True)
    buffer.consume()
    fill(buffer, 1, "s", spare=True)
    buffer.lower("s", 0)
    fill(buffer, 1, "b", occupied=True)
    assert buffer.consume().expired == ("s",)


# The picture for people --------------------------------------------------------------------------------


def test_the_placement_is_earliest_deadline_first_with_occupied_first():
    buffer = make(bound=2, batch_size=2, next_buffer=2)
    fill(buffer, 1, "r0", "r1", "r2")
    fill(buffer, 1, "o0", occupied=True)
    fill(buffer, 2, "o1", occupied=True)
    # d = 3: o0 and r0 in buffer 2, r1 and r2 in buffer 3; d = 4: o1 in buffer 4
    assert buffer.placement() == ((1, 1), (2, 0), (0, 1))


# Illegal transitions -----------------------------------------------------------------------------------


def crowded():
    """bound 1, batch 2, c = 1: `old` (V 0) and `done` (V 0, occupied), `new` and `more` (V 1); two spares."""
    buffer = make(bound=1, batch_size=2, spare_limit=2, next_buffer=1)
    fill(buffer, 0, "old")
    fill(buffer, 0, "done", occupied=True)
    fill(buffer, 1, "new", "more")
    fill(buffer, 0, "spare", spare=True)
    fill(buffer, 0, "spared", spare=True, occupied=True)
    return buffer


ILLEGAL = {
    "reserve a group twice": lambda b: b.reserve("old", 1),
    "reserve a spare's id": lambda b: b.reserve("spare", 1),
    "reserve above capacity": lambda b: b.reserve("x", 1),
    "reserve a version past its bound": lambda b: b.reserve("x", -1),
    "reserve a version to come": lambda b: b.reserve("x", 2),
    "reserve a spare above the limit": lambda b: b.reserve("x", 1, spare=True),
    "reserve a spare id twice": lambda b: b.reserve("old", 1, spare=True),
    "lower an unknown group": lambda b: b.lower("x", 0),
    "lower an occupied group": lambda b: b.lower("done", 0),
    "lower where there is no room": lambda b: b.lower("new", 0),
    "raise a version": lambda b: b.lower("old", 1),
    "lower past the bound": lambda b: b.lower("old", -1),
    "raise a spare's version": lambda b: b.lower("spare", 1),
    "lower a spare past the bound": lambda b: b.lower("spare", -1),
    "lower an occupied spare": lambda b: b.lower("spared", 0),
    "occupy an unknown group": lambda b: b.occupy("x"),
    "occupy twice": lambda b: b.occupy("done"),
    "occupy a spare twice": lambda b: b.occupy("spared"),
    "release an unknown group": lambda b: b.release("x"),
    "release an occupied firm group": lambda b: b.release("done"),
    "promote an unknown group": lambda b: b.promote("x"),
    "promote a firm group": lambda b: b.promote("old"),
    "promote where there is no room": lambda b: b.promote("spared"),
    "swap unknown groups": lambda b: b.swap("x", "y"),
    "swap an unfinished spare": lambda b: b.swap("spare", "old"),
    "swap out an occupied group": lambda b: b.swap("spared", "done"),
    "swap out a spare": lambda b: b.swap("spared", "spare"),
    "swap in a firm group": lambda b: b.swap("done", "old"),
    "swap where there is no room": lambda b: b.swap("spared", "new"),
    "consume with too few occupied": lambda b: b.consume(),
    "consume as final with work unfinished": lambda b: b.consume(final=True),
    "look up an unknown group": lambda b: b.entry("x"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_transition_raises_and_changes_nothing(name):
    buffer = crowded()
    before = picture(buffer)
    with pytest.raises(ProtocolError):
        ILLEGAL[name](buffer)
    assert picture(buffer) == before


def test_an_illegal_consume_with_enough_occupied_changes_nothing():
    buffer = crowded()
    buffer.occupy("new")
    before = picture(buffer)
    with pytest.raises(ProtocolError):
        buffer.consume()  # would leave `old`, whose deadline is now
    assert picture(buffer) == before


@pytest.mark.parametrize(
    "constants", [{"bound": -1}, {"batch_size": 0}, {"spare_limit": -1}, {"next_buffer": -1}]
)
def test_constants_out_of_range_are_refused(constants):
    with pytest.raises(ValueError, match="need"):
        make(**constants)
