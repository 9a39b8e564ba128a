"""The heap of the coordinating process: set aside, not forgotten."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from staleflow.runtime.gc_tuning import THAW_EVERY, Heap


class Thing:
    other: Thing | None = None


@pytest.fixture(autouse=True)
def _nothing_is_left_set_aside() -> Iterator[None]:
    yield
    gc.unfreeze()


def cycle() -> tuple[Thing, weakref.ref[Thing]]:
    thing = Thing()
    thing.other = Thing()
    thing.other.other = thing
    return thing, weakref.ref(thing)


def test_what_lives_is_not_looked_through_again_and_what_is_garbage_goes() -> None:
    thing = cycle()[0]
    dead = cycle()[1]
    Heap().settle()
    assert dead() is None
    assert all(found is not thing for found in gc.get_objects())


def test_garbage_made_of_what_was_set_aside_is_found_in_the_end() -> None:
    heap = Heap()
    thing, dead = cycle()
    heap.settle()
    del thing
    gc.collect()
    assert dead() is not None
    for _ in range(THAW_EVERY):
        heap.settle()
    assert dead() is None


def test_without_cycles_what_was_set_aside_is_freed_at_once() -> None:
    thing = Thing()
    dead = weakref.ref(thing)
    Heap().settle()
    del thing
    assert dead() is None
