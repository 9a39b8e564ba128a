"""Hall's condition by hand, and against trying every placement."""

from itertools import product

import pytest

from staleflow.errors import ProtocolError
from staleflow.protocol.placement import DeadlineCounts


def placeable(offsets, buffers, batch_size):
    """Can each entry get a buffer at or before its offset, at most batch_size to a buffer? By trying all."""
    for chosen in product(*(range(offset + 1) for offset in offsets)):
        if all(chosen.count(buffer) <= batch_size for buffer in range(buffers)):
            return True
    return False


def test_a_bound_of_0_admits_one_batch_of_the_present_version():
    counts = DeadlineCounts(bound=0, batch_size=2, next_buffer=3)
    assert [counts.can_add(version) for version in (2, 3, 4)] == [False, True, False]
    counts.add(3)
    counts.add(3)
    assert not counts.can_add(3)
    assert counts.as_tuple() == (2,)


def test_versions_from_next_buffer_minus_bound_to_next_buffer_are_admissible():
    counts = DeadlineCounts(bound=2, batch_size=4, next_buffer=5)
    assert [version for version in range(-3, 9) if counts.can_add(version)] == [3, 4, 5]
    early = DeadlineCounts(bound=2, batch_size=4, next_buffer=1)
    assert [version for version in range(-3, 9) if early.can_add(version)] == [0, 1]


def test_the_earliest_deadline_fills_first():
    counts = DeadlineCounts(bound=1, batch_size=2, next_buffer=1)
    for _ in range(3):
        counts.add(1)  # deadline 2: one of them will have to be trained on in step 1
    counts.add(0)  # deadline 1: the last place of step 1
    assert counts.as_tuple() == (1, 3)
    assert not counts.can_add(0)
    assert not counts.can_add(1)
    counts.remove(1)
    assert counts.can_add(0)


def test_an_entry_moves_to_an_older_version_only_where_there_is_room():
    counts = DeadlineCounts(bound=1, batch_size=1, next_buffer=1)
    counts.add(1)
    assert counts.can_move(1, 0)
    counts.move(1, 0)
    assert counts.as_tuple() == (1, 0)
    counts.add(1)
    assert not counts.can_move(1, 0)
    assert counts.can_move(0, 0)
    assert not counts.can_move(1, -1)


@pytest.mark.parametrize(("bound", "batch_size"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_condition_agrees_with_trying_every_placement(bound, batch_size):
    limit = (bound + 1) * batch_size + 1
    for per_offset in product(range(limit + 1), repeat=bound + 1):
        if sum(per_offset) > limit:
            continue
        offsets = [offset for offset, count in enumerate(per_offset) for _ in range(count)]
        try:
            counts = DeadlineCounts(bound=bound, batch_size=batch_size, next_buffer=bound, counts=per_offset)
        except ValueError:
            assert not placeable(offsets, bound + 1, batch_size)
            continue
        assert placeable(offsets, bound + 1, batch_size)
        assert counts.as_tuple() == per_offset
        assert counts.total == len(offsets)
        for more in range(bound + 1):
            assert counts.can_add(more) == placeable([*offsets, more], bound + 1, batch_size)
            for old in set(offsets):
                moved = [*offsets, more]
                moved.remove(old)
                assert counts.can_move(old, more) == placeable(moved, bound + 1, batch_size)


def test_a_refused_operation_changes_nothing():
    counts = DeadlineCounts(bound=1, batch_size=1, next_buffer=1, counts=(1, 1))
    before = counts.copy()
    for refused in (
        lambda: counts.add(1),
        lambda: counts.add(7),
        lambda: counts.move(1, 0),
        lambda: counts.move(1, 2),
        lambda: counts.remove(2),
        lambda: counts.advance([0, 1]),
        lambda: counts.advance([2, 0]),
    ):
        with pytest.raises(ProtocolError):
            refused()
        assert counts == before


def test_a_copy_is_independent_and_counts_rebuild_it():
    counts = DeadlineCounts(bound=2, batch_size=2, next_buffer=4, counts=(1, 2, 0))
    copy = counts.copy()
    copy.add(4)
    assert counts.as_tuple() == (1, 2, 0)
    assert copy.as_tuple() == (1, 2, 1)
    assert copy != counts
    assert DeadlineCounts(bound=2, batch_size=2, next_buffer=4, counts=copy.as_tuple()) == copy


def test_advancing_takes_the_batch_and_opens_a_new_deadline():
    counts = DeadlineCounts(bound=2, batch_size=2, next_buffer=4, counts=(1, 2, 3))
    counts.advance([1, 1, 0])
    assert counts.next_buffer == 5
    assert counts.as_tuple() == (1, 3, 0)
    assert counts.can_add(5)
    assert not counts.can_add(6)


@pytest.mark.parametrize(
    "constants",
    [
        {"bound": -1, "batch_size": 1},
        {"bound": 0, "batch_size": 0},
        {"bound": 0, "batch_size": 1, "next_buffer": -1},
        {"bound": 1, "batch_size": 1, "counts": (1,)},
        {"bound": 1, "batch_size": 1, "counts": (-1, 1)},
        {"bound": 1, "batch_size": 1, "counts": (2, 0)},
    ],
)
def test_constants_out_of_range_are_refused(constants):
    with pytest.raises(ValueError, match=r"need|not placeable"):
        DeadlineCounts(**constants)
