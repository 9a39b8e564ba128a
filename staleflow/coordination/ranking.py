"""Instances with room, by weight version and in order of preference: what all routing is decided on.

Invariant: each instance with room is in the heap of its version once. Taking the first costs O(1), a Route to
it O(log instances); only a trajectory too long for the first one makes a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from staleflow.coordination.speculative import InstanceState, SpeculativeState


class Ranking:
    """One cycle's order of preference among instances.

    `cost(instance)`: the lowest is taken first; among equals the one that was routed to least recently, by
    `last_turn`, which `routed` keeps up to date. `has_room(instance, length)`: with length 0, whether the
    instance takes part at all.
    """

    def __init__(
        self,
        state: SpeculativeState,
        *,
        cost: Callable[[InstanceState], float],
        has_room: Callable[[InstanceState, int], bool],
        last_turn: dict[str, int],
    ) -> None:
        self._state = state
        self._cost = cost
        self._has_room = has_room
        self._last_turn = last_turn
        self._turn = max(last_turn.values(), default=0)
        self._heaps: dict[int, list[tuple[float, int, str]]] = {}
        self._admissible: dict[int | None, tuple[int, ...]] = {}
        for name, instance in state.instances.items():
            if has_room(instance, 0):
                entry = (cost(instance), last_turn.get(name, 0), name)
                self._heaps.setdefault(instance.version, []).append(entry)
        for heap in self._heaps.values():
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
        best: tuple[float, int, str] | None = None
        for version in versions:
            heap = self._heaps[version]
            top: tuple[float, int, str] | None = heap[0]
            if not self._fits(heap[0], length):
                top = min((entry for entry in heap if self._fits(entry, length)), default=None)
            if top is not None and (best is None or top < best):
                best = top
        return None if best is None else best[2]

    def routed(self, name: str, *, admission: bool) -> None:
        """A trajectory was routed to the instance; `admission`: the buffer's counts changed with that."""
        self._turn += 1
        self._last_turn[name] = self._turn
        instance = self._state.instances[name]
        heap = self._heaps[instance.version]
        if not self._has_room(instance, 0):
            self.leave_out(name)
        elif heap[0][2] == name:
            heapreplace(heap, (self._cost(instance), self._turn, name))
        else:
            at = next(i for i, entry in enumerate(heap) if entry[2] == name)
            heap[at] = (self._cost(instance), self._turn, name)
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
            heap[:] = [entry for entry in heap if entry[2] != name]
            heapify(heap)
        if not heap:
            del self._heaps[version]
            self._admissible.clear()

    def members(self, versions: tuple[int, ...]) -> list[InstanceState]:
        """All instances with room of these versions."""
        return [self._state.instances[name] for v in versions for _, _, name in self._heaps[v]]

    def _fits(self, entry: tuple[float, int, str], length: int) -> bool:
        return self._has_room(self._state.instances[entry[2]], length)
