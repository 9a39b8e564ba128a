"""Routing: which waiting trajectory goes to which instance.

All strategies take the waiting trajectories oldest reservation first, and first come, first served inside a
level; none routes what the protocol does not admit.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from staleflow.coordination.pending import PendingTrajectory
from staleflow.coordination.ranking import Ranking, RankingMemory
from staleflow.coordination.speculative import InstanceState, SpeculativeState

KV_HEADROOM = 0.1
"""Share of the KV cache left free, because lengths are only expected ones."""
MOST_HOLDS = 8
"""Instances that one cycle keeps free for trajectories too long for the room there is now."""


class RoutingStrategy(Protocol):
    """Orders Routes through the speculative state."""

    def route(self, state: SpeculativeState) -> None:
        """Order as many Routes as make sense now."""
        ...


def has_room(state: InstanceState, length: int, expected_held: int, headroom: float = KV_HEADROOM) -> bool:
    """Whether the instance can take one more trajectory of `length` tokens.

    Two conditions: what is there now fits with one token more for each trajectory; and what all of them are
    expected to hold, `expected_held` tokens each, leaves a share `headroom` of the cache free. An empty
    instance takes anything: whatever fits a KV cache at all must be able to run somewhere. Where some wait
    inside the instance already, one more would only wait too.
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


class WaterfallRouting:
    """Each trajectory goes where it adds most throughput (StaleFlow paper, routing).

    A trajectory of l tokens goes to the admissible instance with room whose marginal gain
    ΔT = T(n + 1, kv + l) - T(n, kv) is largest, if ΔT >= μ * ΔT_ideal, its gain on an empty instance; else it
    waits, for an instance that is full now may be half empty when it is needed. Trajectories that the next
    buffer needs do not wait for a better gain. Lowering a group's V is the second choice, a spare place for a
    new group the last.

    Instances are compared by the gain of a trajectory of typical length, so that they need not be sorted anew
    for each; μ is applied to the real one. A trajectory too long for the room that any instance has keeps
    the one with most room free for itself, so that short ones do not overtake it for ever.
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
        """Route a trajectory, or keep an instance free for it. False: those behind it cannot go either."""
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
        """Keep the roomiest instance free. False: enough are kept."""
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
    """Least loaded: each trajectory to the admissible instance with the fewest, whatever that gains.

    As many as the KV cache is expected to hold. Lowering a group's V is the second choice.
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
    """One queue, and a cap on the trajectories of each instance: whoever has fewest gets the next one."""

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
    """Whole groups, each at once to the instance with fewest trajectories, whatever room there is.

    What waits, waits inside the instance, in its own queue, and never moves.
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
