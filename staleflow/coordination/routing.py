"""Routing: which waiting trajectory goes to which instance.

Every strategy takes the waiting trajectories oldest reservation first, then first come, first served, and
routes only what the protocol admits. All of them choose from a `Ranking`: the instances with room, by weight
version and in order of preference. Invariant: each instance with room is in the heap of its version once.
Taking the first costs O(1), a Route to it O(log instances); only a trajectory too long for the first needs a
scan. Between cycles an instance keeps its place while nothing about it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Protocol

from staleflow.coordination.snapshot import PendingTrajectory
from staleflow.coordination.speculative import IdentityCache, InstanceState, SpeculativeState

KV_HEADROOM = 0.1
"""Share of the KV cache left free, because lengths are only expectations."""
MOST_HOLDS = 8
"""Most instances that one cycle keeps free for trajectories too long for the present room."""


class RoutingStrategy(Protocol):
    """Orders Routes through the speculative state."""

    def route(self, state: SpeculativeState) -> None:
        """Order the Routes that make sense now."""
        ...


def has_room(state: InstanceState, length: int, expected_held: int, headroom: float = KV_HEADROOM) -> bool:
    """Whether the instance can take one more trajectory of `length` tokens.

    Two conditions: the present tokens fit with one more token per trajectory; and the expected tokens,
    `expected_held` per trajectory, leave a share `headroom` of the cache free. An empty instance accepts any
    trajectory: whatever fits a KV cache at all must be able to run somewhere. If trajectories wait in the
    instance's own queue, one more would only wait as well.
    """
    resident = state.resident
    if resident == 0:
        return True
    if resident >= state.max_running or state.waiting:
        return False
    now, expected, capacity = state.kv_tokens + length, (resident + 1) * expected_held, state.kv_capacity
    if expected < now:
        expected = now
    return expected <= (1 - headroom) * capacity and now + resident + 1 <= capacity


Place = tuple[float, int, str]
"""(cost, turn in which it was last routed to, instance): the smallest comes first."""


class RankingMemory:
    """State of a routing strategy between cycles: when each instance had its turn, and known places."""

    def __init__(self) -> None:
        self.turn = 0
        self.last_turn: dict[str, int] = {}
        self.places: IdentityCache[InstanceState, tuple[int, Place] | None] = IdentityCache()
        """With the weight version; None: the instance has no room."""


class Ranking:
    """One cycle's order of preference among instances.

    `cost(instance)`: the lowest comes first; among equals, the least recently routed to.
    `has_room(instance, length)`: an instance takes part if it has room for a trajectory of `typical` length.
    `basis`: everything that `cost` and `has_room` depend on beside the instance.
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
        """Whether no instance has room."""
        return not self._heaps

    def admissible(self, group_version: int | None) -> tuple[int, ...]:
        """Versions with room under which a member of such a group may run; lowering is the last resort."""
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
        """The newest version with room under which a spare group may start, if any."""
        versions = [v for v in self._heaps if self._state.admits_spare(v)]
        return (max(versions),) if versions else ()

    def first(self, versions: tuple[int, ...], length: int) -> str | None:
        """The preferred instance of these versions for `length` tokens; None: none has room."""
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
        """Note a Route to the instance; `admission`: it changed the buffer's counts."""
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
        """Exclude the instance for the rest of this cycle."""
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
        """All instances of these versions that have room."""
        return [self._state.instances[name] for v in versions for _, _, name in self._heaps[v]]

    def _fits(self, place: Place, length: int) -> bool:
        return self._has_room(self._state.instances[place[2]], length)


class WaterfallRouting:
    """Each trajectory goes where it adds most throughput (StaleFlow paper, routing).

    A trajectory of l tokens goes to the admissible instance with room whose marginal gain
    ΔT = T(n + 1, kv + l) - T(n, kv) is largest, if ΔT >= μ * ΔT_ideal, its gain on an empty instance.
    Otherwise it waits: an instance that is full now may be half empty when the trajectory is needed.
    Trajectories that the next buffer needs ignore μ. Lowering a group's V is the second choice, a spare place
    for a new group the last.

    Instances are compared by the gain of a trajectory of typical length, so they are not sorted anew for each
    trajectory; μ is applied to the real length. A trajectory too long for the room of every instance keeps
    the roomiest one free for itself, so that short ones cannot overtake it for ever.
    """

    def __init__(self, *, mu: float = 0.3, kv_headroom: float = KV_HEADROOM) -> None:
        self._mu = mu
        self._kv_headroom = kv_headroom
        self._memory = RankingMemory()
        self._holds = 0

    def route(self, state: SpeculativeState) -> None:
        """Route level after level until no instance has room."""
        pending = state.snapshot.pending
        if not pending:
            return
        held, headroom, costs = state.snapshot.expected_held, self._kv_headroom, state.snapshot.costs
        ranking = Ranking(
            state,
            self._memory,
            typical=held,
            basis=(costs, held),
            cost=lambda s: -costs.gain(s.running, s.kv_tokens, held),
            has_room=lambda s, length: has_room(s, length, held, headroom),
        )
        self._holds = 0
        for level in pending.levels():
            mu = -inf if _is_critical(state, level) else self._mu  # needed now, even at a loss
            for item in pending.level(level):
                if ranking.is_empty:
                    return
                if not self._route_one(state, ranking, item, mu):
                    break

    def _route_one(
        self, state: SpeculativeState, ranking: Ranking, item: PendingTrajectory, mu: float
    ) -> bool:
        """Route a trajectory, or keep an instance free for it. False: the rest of its level must wait too."""
        group_version = state.group_version(item)
        versions, spare = ranking.admissible(group_version), False
        if not versions and group_version is None:
            versions, spare = ranking.admissible_as_spare(), True
        if not versions:
            return False
        name = ranking.first(versions, item.length)
        if name is None:
            return self._hold_one(ranking, versions)
        instance, costs = state.instances[name], state.snapshot.costs
        gain = costs.gain(instance.running, instance.kv_tokens, item.length)
        if instance.resident and gain < mu * costs.ideal_gain(item.length):
            return False
        reason = f"gain {gain:.4g} tokens/s" + (", as a spare" if spare else "")
        admission = state.route(item, name, reason, spare=spare)
        ranking.routed(name, admission=admission is not None)
        return True

    def _hold_one(self, ranking: Ranking, versions: tuple[int, ...]) -> bool:
        """Keep the roomiest instance free. False: enough are kept free already."""
        if self._holds == MOST_HOLDS:
            return False
        self._holds += 1
        roomiest = max(ranking.members(versions), key=lambda s: s.kv_capacity - s.kv_tokens)
        ranking.leave_out(roomiest.instance)
        return True


def _is_critical(state: SpeculativeState, level: int | None) -> bool:
    """Whether the next buffer needs the trajectories of a level."""
    version = state.snapshot.newest_version if level is None else level
    return version + state.snapshot.counts.bound <= state.snapshot.next_buffer


class NaiveRouting:
    """Least loaded: each trajectory goes to the admissible instance with the fewest, whatever the gain.

    Up to what the KV cache is expected to hold. Lowering a group's V is the second choice.
    """

    def __init__(self, *, kv_headroom: float = KV_HEADROOM) -> None:
        self._kv_headroom = kv_headroom
        self._memory = RankingMemory()

    def route(self, state: SpeculativeState) -> None:
        """Route every waiting trajectory that some instance has room for and the protocol admits."""
        held, headroom = state.snapshot.expected_held, self._kv_headroom
        ranking = Ranking(
            state,
            self._memory,
            typical=held,
            basis=held,
            cost=lambda s: s.resident,
            has_room=lambda s, length: has_room(s, length, held, headroom),
        )
        _route_by_rank(state, ranking)


class CentralQueueRouting:
    """One queue and a cap per instance: the instance with the fewest trajectories gets the next one."""

    def __init__(self, *, max_per_instance: int) -> None:
        self._cap = max_per_instance
        self._memory = RankingMemory()

    def route(self, state: SpeculativeState) -> None:
        """Route in order of arrival until all instances are at the cap."""
        cap = self._cap
        ranking = Ranking(
            state,
            self._memory,
            cost=lambda s: s.resident,
            has_room=lambda s, length: s.resident < cap,
        )
        _route_by_rank(state, ranking, "central queue: fewest, below the cap")


class StaticRouting:
    """Each whole group goes at once to the instance with the fewest trajectories, whether it has room or not.

    Trajectories wait in the instance's own queue and never move.
    """

    def __init__(self) -> None:
        self._memory = RankingMemory()

    def route(self, state: SpeculativeState) -> None:
        """Route all that the protocol admits."""
        ranking = Ranking(
            state,
            self._memory,
            cost=lambda s: s.resident,
            has_room=lambda s, length: True,
        )
        homes: dict[str, str] = {}
        for level in state.snapshot.pending.levels():
            for item in state.snapshot.pending.level(level):
                name = homes.get(item.group_id)
                if name is None:
                    versions = ranking.admissible(state.group_version(item))
                    name = ranking.first(versions, item.length)
                if name is None:
                    break
                homes[item.group_id] = name
                admission = state.route(item, name, "its group's instance")
                ranking.routed(name, admission=admission is not None)


def _route_by_rank(state: SpeculativeState, ranking: Ranking, reason: str = "least loaded") -> None:
    for level in state.snapshot.pending.levels():
        for item in state.snapshot.pending.level(level):
            if ranking.is_empty:
                return
            name = ranking.first(ranking.admissible(state.group_version(item)), item.length)
            if name is None:
                break  # all of a level need the same admission
            admission = state.route(item, name, reason)
            ranking.routed(name, admission=admission is not None)
