"""Every state of every small world: bound <= 3, batch <= 3, full, with a spare entry beyond.

A state, up to renaming of groups and shifting of versions, is the number of reserved and of occupied firm
entries at each offset d - c, and the spare entry's offset and whether it is occupied. The newest version v
adds nothing to it: at v = c every move of v = c - 1 is legal too, so v = c is assumed throughout.

Each state here is built by legal calls on the real buffer, so it is reachable. In each, the buffer's answer
to every question is compared with an oracle that places all entries by earliest deadline explicitly. As the
answers agree, no legal move leaves the placeable states: that is the bound and the capacity, by induction.
And wherever all entries are occupied, consume or reserve must be legal: that is liveness.
"""

from functools import cache
from itertools import product
from math import prod

import pytest

from staleflow.protocol import BufferState, StalenessBuffer

WORLDS = list(product(range(4), range(1, 4)))


@cache
def fits(counts, batch_size):
    """Can `counts[k]` entries of offset k all be placed? Sorted by deadline, batch after batch."""
    offsets = [offset for offset, count in enumerate(counts) for _ in range(count)]
    return all(place // batch_size <= offset for place, offset in enumerate(offsets))


def plus(counts, offset, change=1):
    return (*counts[:offset], counts[offset] + change, *counts[offset + 1 :])


def after_consume(occupied, total, batch_size):
    """(occupied, total) by offset from the next buffer on when its batch is taken, or None if illegal."""
    need, left, rest = batch_size, list(occupied), list(total)
    for offset, count in enumerate(occupied):
        taken = min(need, count)
        need -= taken
        left[offset] -= taken
        rest[offset] -= taken
    shifted = (*rest[1:], 0)
    if need or rest[0] or not fits(shifted, batch_size):
        return None
    return (*left[1:], 0), shifted


class World:
    """Walks through all states of one bound and batch size with one real buffer at a time."""

    def __init__(self, bound, batch_size):
        self.bound, self.batch_size = bound, batch_size
        self.none = (0,) * (bound + 1)
        self.firm_states = self.states = self.all_occupied = 0

    def walk(self):
        for occupied in product(range((self.bound + 1) * self.batch_size + 1), repeat=self.bound + 1):
            if fits(occupied, self.batch_size):
                self.add_reserved(self.build(occupied), occupied, self.none, 0)

    def build(self, occupied, reserved=None, spare=None):
        """A real buffer in this state, at c = bound, so that offset k is version k."""
        buffer = StalenessBuffer(
            bound=self.bound, batch_size=self.batch_size, spare_limit=1, next_buffer=self.bound
        )
        for version, count in enumerate(occupied):
            for n in range(count):
                buffer.reserve(f"o{version}.{n}", version)
                buffer.occupy(f"o{version}.{n}")
        for version, count in enumerate(reserved or ()):
            for n in range(count):
                buffer.reserve(f"r{version}.{n}", version)
        if spare:
            self.add_spare(buffer, *spare)
        return buffer

    def add_spare(self, buffer, offset, spare_occupied):
        buffer.reserve("spare", offset, spare=True)
        if spare_occupied:
            buffer.occupy("spare")

    def add_reserved(self, buffer, occupied, reserved, first):
        """Check the state, then those with one more reserved entry at offset `first` or later."""
        total = tuple(map(sum, zip(occupied, reserved, strict=True)))
        assert buffer.counts().as_tuple() == total
        self.check_firm(buffer, occupied, reserved, total)
        self.check_with_spares(buffer, occupied, reserved, total)
        for offset in range(first, self.bound + 1):
            if fits(plus(total, offset), self.batch_size):
                group = f"r{offset}.{reserved[offset]}"
                buffer.reserve(group, offset)
                self.add_reserved(buffer, occupied, plus(reserved, offset), offset)
                buffer.release(group)

    def check_firm(self, buffer, occupied, reserved, total):
        """Bound, capacity, every question about firm entries, the effect of consume, and liveness."""
        self.firm_states += 1
        size, bound = self.batch_size, self.bound
        assert fits(total, size)
        assert sum(total) <= (bound + 1) * size
        assert not buffer.can_reserve(-1)
        assert not buffer.can_reserve(bound + 1)
        for offset in range(bound + 1):
            assert buffer.can_reserve(offset) == fits(plus(total, offset), size)
            if reserved[offset]:
                for lower in range(offset):
                    moved = plus(plus(total, offset, -1), lower)
                    assert buffer.can_lower(f"r{offset}.0", lower) == fits(moved, size)
        expected = after_consume(occupied, total, size)
        assert buffer.can_consume() == (expected is not None)
        if expected:
            self.check_consume(occupied, reserved, expected)
        if not any(reserved):
            self.all_occupied += 1
            assert buffer.can_consume() or buffer.can_reserve(bound)
            assert buffer.state() != BufferState.STUCK
            assert buffer.can_consume(final=True) == (sum(total) > 0)
        else:
            assert not buffer.can_consume(final=True)

    def check_consume(self, occupied, reserved, expected):
        buffer = self.build(occupied, reserved)
        consumed = buffer.consume()
        assert len(consumed.entries) == self.batch_size
        assert all(entry.version + self.bound >= consumed.buffer for entry in consumed.entries)
        assert buffer.counts().as_tuple() == expected[1]
        ready = sum(occupied for _, occupied in buffer.placement())
        assert ready == sum(expected[0])

    def check_with_spares(self, buffer, occupied, reserved, total):
        """Every question that a spare entry bears on; then the spare is released again."""
        size, bound = self.batch_size, self.bound
        consumable = after_consume(occupied, total, size) is not None
        unfinished = [offset for offset in range(bound + 1) if reserved[offset]]
        for spare in range(bound + 1):
            promotable = fits(plus(total, spare), size)
            swappable = [(k, fits(plus(plus(total, k, -1), spare), size)) for k in unfinished]
            for spare_occupied in (False, True):
                self.states += 1
                self.add_spare(buffer, spare, spare_occupied)
                assert not buffer.can_reserve(bound, spare=True)
                assert buffer.can_promote("spare") == promotable
                for offset, swaps in swappable:
                    assert buffer.can_swap("spare", f"r{offset}.0") == (swaps and spare_occupied)
                assert buffer.can_consume() == consumable
                assert buffer.can_consume(final=True) == (
                    spare_occupied and not unfinished and sum(total) > 0
                )
                if spare_occupied and not unfinished:  # liveness is not hindered by a spare
                    assert consumable or buffer.can_reserve(bound)
                buffer.release("spare")


@pytest.mark.parametrize(("bound", "batch_size"), WORLDS)
def test_every_state_of_a_small_world_keeps_bound_capacity_and_liveness(bound, batch_size):
    world = World(bound, batch_size)
    world.walk()
    room = range((bound + 1) * batch_size + 1)
    totals = [total for total in product(room, repeat=bound + 1) if fits(total, batch_size)]
    assert world.firm_states == sum(prod(count + 1 for count in total) for total in totals)
    assert world.states == world.firm_states * 2 * (bound + 1)
    assert world.all_occupied > 1


@pytest.mark.parametrize(("bound", "batch_size"), [world for world in WORLDS if world[0] * world[1] <= 4])
def test_the_effect_of_every_move_with_a_spare_is_as_said(bound, batch_size):
    """In the smaller worlds each move is made in each state, on a buffer of its own."""
    world = World(bound, batch_size)
    offsets = range(bound + 1)
    for firm in product(range((bound + 1) * batch_size + 1), repeat=2 * (bound + 1)):
        occupied, reserved = firm[: bound + 1], firm[bound + 1 :]
        total = tuple(map(sum, zip(occupied, reserved, strict=True)))
        if not fits(total, batch_size):
            continue
        for spare in product(offsets, (False, True)):
            at, done = spare

            def fresh(occupied=occupied, reserved=reserved, spare=spare):
                return world.build(occupied, reserved, spare)

            buffer = fresh()
            if buffer.can_promote("spare"):
                buffer.promote("spare")
                assert buffer.counts().as_tuple() == plus(total, at)
                assert buffer.entry("spare").occupied == done
            for offset in offsets:
                buffer = fresh()
                if reserved[offset] and buffer.can_swap("spare", f"r{offset}.0"):
                    buffer.swap("spare", f"r{offset}.0")
                    assert buffer.counts().as_tuple() == plus(plus(total, offset, -1), at)
                    assert buffer.entry(f"r{offset}.0").spare
                for lower in range(offset):
                    buffer = fresh()
                    if reserved[offset] and buffer.can_lower(f"r{offset}.0", lower):
                        buffer.lower(f"r{offset}.0", lower)
                        assert buffer.counts().as_tuple() == plus(plus(total, offset, -1), lower)
            buffer = fresh()
            if buffer.can_consume():
                consumed = buffer.consume()
                assert consumed.expired == (("spare",) if at == 0 else ())
                assert ("spare" in buffer) == (at > 0)
                assert buffer.counts().as_tuple() == after_consume(occupied, total, batch_size)[1]
