"""Instances with room, by weight version and in order of preference: what all routing is decided on.

Invariant: each instance with room is in the heap of its version once. Taking the first costs O(1), a Route to
it O(log instances); only a trajectory too long for the first one makes a scan. Between cycles the place of an
instance is kept for as long as nothing about it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heapreplace

from staleflow.coordination.identity_cache import Kept
from staleflow.coordination.speculative import InstanceState, SpeculativeState

Place = tuple[float, int, str]
"""(cost, turn in which it was last routed to, instance): the smallest comes first."""


class RankingMemory:
    """What a routing strategy keeps between cycles: whose turn was when, and places already worked out."""

    def __init__(self) -> None:
        self.turn = 0
        self.last_turn: dict[str, int] = {}
        self.places: Kept[InstanceState, tuple[int, Place] | None] = Kept()
        """With the weight version; None: there is no room."""


class Ranking:
    """One cycle's order of preference among instances.

    `cost(instance)`: the lowest is taken first; among equals the one that was routed to least recently.
    `has_room(instance, length)`: an instance takes part if it has room for a trajectory of `typical` length.
    `basis`: whatever `cost` and `has_room` depend on beside the instance.
    """

    def __init__(
        self,
        state: SpeculativeState,
        memory: RankingMemory,
        *,
        cost: Callable[[InstanceState], float],
        has_room: Callable[[InstanceState, int], bool],
        typical: int = 0,
        basis: Hashable = None,
    ) -> None:
        self._state = state
        self._memory = memory
        self._cost = cost
        self._has_room = has_room
        self._typical = typical
        self._heaps: dict[int, list[Place]] = {}
        self._admissible: dict[int | None, tuple[int, ...]] = {}
        last_turn, heaps = memory.last_turn, self._heaps

        def place(instance: InstanceState) -> tuple[int, Place] | None:
            if not has_room(instance, typical):
                return None
            name = instance.instance
            return instance.version, (cost(instance), last_turn.get(name, 0), name)

        for version, found in filter(None, memory.places.of(state.instances, place, basis).values()):
            heap = heaps.get(version)
            if heap is None:
                heaps[version] = [found]
            else:
                heap.append(found)
        for heap in heaps.values():
            heapify(heap)

    @property
    def is_empty(self) -> bool:
        """No instance has room."""
        return not self._heaps

    def admissible(self, group_version: int | None) -> tuple[int, ...]:
        """Versions with room under which a member of such a group may run; lowering only if nothing else."""
        known = self._admissible.get(group_version)
        if known is None:
            state = self._state
            if group_version is None:
                known = tuple(v for v in self._heaps if state.admits_fresh(v))
            else:
                known = tuple(v for v in self._heaps if v >= group_version)
                known = known or tuple(v for v in self._heaps if state.admits_reserved(group_version, v))
            self._admissible[group_version] = known
        return known

    def admissible_as_spare(self) -> tuple[int, ...]:
        """The newest version with room under which a spare group may start, if there is one."""
        there = [v for v in self._heaps if self._state.admits_spare(v)]
        return (max(there),) if there else ()

    def first(self, versions: tuple[int, ...], length: int) -> str | None:
        """The instance of these versions to prefer for `length` tokens; None: there is no room for them."""
        best: Place | None = None
        for version in versions:
            heap = self._heaps[version]
            top: Place | None = heap[0]
            if length > self._typical and not self._fits(heap[0], length):
                top = min((place for place in heap if self._fits(place, length)), default=None)
            if top is not None and (best is None or top < best):
                best = top
        return None if best is None else best[2]

    def routed(self, name: str, *, admission: bool) -> None:
        """A trajectory was routed to the instance; `admission`: the buffer's counts changed with that."""
        memory = self._memory
        memory.turn = turn = memory.turn + 1
        memory.last_turn[name] = turn
        instance = self._state.instances[name]
        heap = self._heaps[instance.version]
        if not self._has_room(instance, self._typical):
            self.leave_out(name)
        elif heap[0][2] == name:
            heapreplace(heap, (self._cost(instance), turn, name))
        else:
            at = next(i for i, place in enumerate(heap) if place[2] == name)
            heap[at] = (self._cost(instance), turn, name)
            heapify(heap)
        if admission:
            self._admissible.clear()

    def leave_out(self, name: str) -> None:
        """The instance takes no more part in this cycle."""
        version = self._state.instances[name].version
        heap = self._heaps[version]
        if heap[0][2] == name:
            heappop(heap)
        else:
            heap[:] = [place for place in heap if place[2] != name]
            heapify(heap)
        if not heap:
            del self._heaps[version]
            self._admissible.clear()

    def members(self, versions: tuple[int, ...]) -> list[InstanceState]:
        """All instances with room of these versions."""
        return [self._state.instances[name] for v in versions for _, _, name in self._heaps[v]]

    def _fits(self, place: Place, length: int) -> bool:
        return self._has_room(self._state.instances[place[2]], length)
