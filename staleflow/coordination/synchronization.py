"""Synchronization: which instance pulls the newest weights, and when."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Protocol

from staleflow.coordination.actions import Route
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.routing import KV_HEADROOM, has_room
from staleflow.coordination.speculative import IdentityCache, InstanceState, SpeculativeState

_version = attrgetter("version")


class SynchronizationStrategy(Protocol):
    """Orders Pulls through the speculative state."""

    def synchronize(self, state: SpeculativeState) -> None:
        """Order the Pulls that pay now."""
        ...

    def after_routing(self, state: SpeculativeState) -> bool:
        """Order Pulls that routing turned out to need. True: some were ordered, so route again soon."""
        ...


class NaiveSynchronization:
    """Every instance pulls as soon as a newer version exists."""

    def synchronize(self, state: SpeculativeState) -> None:
        """Order a Pull for each instance behind the newest version."""
        newest = state.snapshot.newest_version
        for instance in list(state.instances):
            if state.instances[instance].version < newest:
                state.pull(instance, f"version {newest} is out")

    def after_routing(self, state: SpeculativeState) -> bool:
        """Order nothing."""
        return False


class BarrierSynchronization:
    """All instances pull together between two batches: when nothing is reserved and nothing runs.

    An instance whose pull was refused misses the barrier. It pulls again while waiting trajectories need it:
    their batch is reserved at the version that it should have, or part of the batch has no reservation yet
    and no instance has a version under which it could start.
    """

    def synchronize(self, state: SpeculativeState) -> None:
        """Order a Pull for each instance behind the newest version, if nothing is reserved or running."""
        snapshot = state.snapshot
        if snapshot.counts.total or any(s.resident for s in state.instances.values()):
            self._catch_up(state)
            return
        for name in list(state.instances):
            if state.instances[name].version < snapshot.newest_version:
                state.pull(name, f"barrier: all instances go to version {snapshot.newest_version}")

    def after_routing(self, state: SpeculativeState) -> bool:
        """Order nothing: between barriers instances wait on purpose."""
        return False

    def _catch_up(self, state: SpeculativeState) -> None:
        needed = self._needed(state)
        for instance in list(state.instances.values()):
            if needed is not None and instance.resident == 0 and instance.version < needed:
                state.pull(
                    instance.instance, f"missed the barrier: waiting trajectories need version {needed}"
                )

    def _needed(self, state: SpeculativeState) -> int | None:
        """The version that the first waiting trajectories need; None: they need none."""
        for level in state.snapshot.pending.levels():
            if level is not None:
                return level
            newest = state.snapshot.newest_version
            versions = {s.version for s in state.instances.values()}
            if state.admits_fresh(newest) and not any(map(state.admits_fresh, versions)):
                return newest
        return None


class SelectiveSynchronization:
    """Each instance pulls on its own time, if the pull unlocks routing and pays.

    Unlocked are waiting trajectories that may run under the newest version and find no room on instances that
    may already take them. A pull costs the tokens not generated meanwhile: T * (pull + prefill of its KV). It
    gains ΔT of the unlocked trajectories for as long as they are expected to run. An instance with nothing
    running loses nothing, so it pulls as soon as any trajectory is unlocked.

    Room is counted in trajectories of typical length, so a long one may not fit. Therefore an instance that
    routing leaves idle also pulls, while trajectories are left that it could run afterwards.
    """

    def __init__(self, *, recompute: bool = True, mu: float = 0.3, kv_headroom: float = KV_HEADROOM) -> None:
        """`recompute`: a pull rebuilds the KV of what runs; `mu`, `kv_headroom`: as for routing."""
        self._recompute = recompute
        self._mu = mu
        self._kv_headroom = kv_headroom
        self._rooms: IdentityCache[InstanceState, int] = IdentityCache()
        self._costs: IdentityCache[InstanceState, float] = IdentityCache()
        self._filled: tuple[tuple[CostModel, int, int], int] | None = None

    def synchronize(self, state: SpeculativeState) -> None:
        """Order the Pulls that pay, cheapest first, until nothing is left to unlock."""
        snapshot = state.snapshot
        newest = snapshot.newest_version
        if not snapshot.pending or not _any_behind(state):
            return
        work = _Work(state)
        unlocked = work.at(newest)
        if unlocked <= 0:
            return
        held, fill = self._typical(state)
        rooms = self._rooms.of(state.instances, lambda s: self._room(s, held, fill), (held, fill))
        behind: list[InstanceState] = []
        for name, instance in state.instances.items():
            if instance.version < newest:
                behind.append(instance)
            elif unlocked > 0:
                unlocked -= rooms[name]
        for instance in behind:
            if unlocked <= 0:
                return
            if instance.resident == 0:
                state.pull(instance.instance, f"idle, and {unlocked} trajectories wait")
                unlocked -= rooms[instance.instance]
        busy = [s for s in behind if s.resident and work.at(s.version) < unlocked]
        if busy:
            self._pull_busy(state, busy, rooms, work, unlocked)

    def _pull_busy(
        self,
        state: SpeculativeState,
        busy: list[InstanceState],
        rooms: Mapping[str, int],
        work: _Work,
        unlocked: int,
    ) -> None:
        """Order Pulls of busy instances for which little can be routed under their present version."""
        model = state.snapshot.costs
        costs = self._costs.of({s.instance: s for s in busy}, lambda s: self._cost(s, model), model)
        for instance in sorted(busy, key=lambda s: (costs[s.instance], s.version, s.instance)):
            if unlocked <= 0:
                return
            room, cost = rooms[instance.instance], costs[instance.instance]
            more = min(unlocked, room) - min(work.left(instance.version), room)
            if more <= 0:
                work.take(instance.version, room)
            elif (gain := self._gain(state, instance, more)) > cost:
                reason = f"unlocks {more} trajectories: {gain:.4g} tokens for {cost:.4g}"
                state.pull(instance.instance, reason)
                unlocked -= room

    def after_routing(self, state: SpeculativeState) -> bool:
        """Order a Pull for as many idle instances as there is work left for."""
        if not _any_behind(state):
            return False
        newest = state.snapshot.newest_version
        idle = [s for s in state.instances.values() if s.resident == 0 and s.version < newest]
        if not idle:
            return False
        left = _left_over(state, newest, len(idle))
        for instance in idle[:left]:
            state.pull(instance.instance, f"idle, and {left} waiting trajectories have no room elsewhere")
        return left > 0

    def _typical(self, state: SpeculativeState) -> tuple[int, int]:
        """(typical tokens held, number of such trajectories that routing would put on an instance)."""
        costs, held = state.snapshot.costs, max(1, state.snapshot.expected_held)
        most = max((s.max_running for s in state.instances.values()), default=1)
        if self._filled is None or self._filled[0] != (costs, held, most):
            self._filled = (costs, held, most), self._fill(costs, held, most)
        return held, self._filled[1]

    def _fill(self, costs: CostModel, held: int, high: int) -> int:
        """Number of trajectories of `held` tokens that an instance takes under μ; at most `high`."""
        least, low = self._mu * costs.ideal_gain(held), 1
        while low < high:
            middle = (low + high + 1) // 2
            if costs.gain(middle - 1, (middle - 1) * held, held) >= least:
                low = middle
            else:
                high = middle - 1
        return low

    def _room(self, instance: InstanceState, held: int, fill: int) -> int:
        """Trajectories of typical length that the instance can take."""
        if not has_room(instance, 0, held, self._kv_headroom):
            return 0
        planned = max(instance.kv_tokens, instance.resident * held)
        tokens = (1 - self._kv_headroom) * instance.kv_capacity - planned
        room = min(min(fill, instance.max_running) - instance.resident, int(tokens / held))
        return max(room, 1 if instance.resident == 0 else 0)

    def _cost(self, instance: InstanceState, costs: CostModel) -> float:
        """Tokens that the instance would have generated during the pull."""
        seconds = costs.pull + (costs.prefill_s(instance.kv_tokens) if self._recompute else 0.0)
        return costs.throughput(instance.running, instance.kv_tokens) * seconds

    def _gain(self, state: SpeculativeState, instance: InstanceState, more: int) -> float:
        """Tokens that `more` trajectories add until their expected end."""
        costs, held = state.snapshot.costs, state.snapshot.expected_held
        running, kv = instance.running, instance.kv_tokens
        after = costs.throughput(running + more, kv + more * held)
        seconds = state.snapshot.expected_growth * costs.step_s(running + more, kv + more * held)
        return (after - costs.throughput(running, kv)) * seconds


def _any_behind(state: SpeculativeState) -> bool:
    """Whether any instance is behind the newest version."""
    return min(map(_version, state.instances.values()), default=0) < state.snapshot.newest_version


class _Work:
    """Waiting trajectories that may run under each version."""

    def __init__(self, state: SpeculativeState) -> None:
        self._state = state
        self._taken = 0
        pending = state.snapshot.pending
        self._levels = [(level, pending.level_size(level)) for level in pending.levels()]
        self._known: dict[int, int] = {}

    def at(self, version: int) -> int:
        """Number of trajectories admissible under `version`."""
        known = self._known.get(version)
        if known is None:
            known = self._known[version] = sum(
                size if level is not None else self._fresh(version, size)
                for level, size in self._levels
                if level is None or self._state.admits_reserved(level, version)
            )
        return known

    def left(self, version: int) -> int:
        """The same, minus what other instances are expected to take."""
        return max(0, self.at(version) - self._taken)

    def take(self, version: int, count: int) -> None:
        """Note that an instance is expected to take `count` of them."""
        self._taken += min(count, self.left(version))

    def _fresh(self, version: int, size: int) -> int:
        """Of `size` waiting members, those of groups that may be reserved at `version`."""
        return min(size, self._state.room(version) * self._state.snapshot.group_members)


def _left_over(state: SpeculativeState, version: int, most: int) -> int:
    """Trajectories not routed in this cycle that may run under `version`, counted up to `most`."""
    routed = {c.trajectory_id for c in state.commands if isinstance(c, Route)}
    count = 0
    for level in state.snapshot.pending.levels():
        for item in state.snapshot.pending.level(level):
            if item.trajectory_id in routed:
                continue
            if not state.admits(item, version):
                break  # the rest of the level needs the same
            count += 1
            if count == most:
                return count
    return count
