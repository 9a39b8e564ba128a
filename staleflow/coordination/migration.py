"""Migration: which trajectories are interrupted on one instance to continue on another.

A moved trajectory returns to the trajectory server and is routed like any other, so it goes where routing
finds the largest gain at that moment. Its target instance keeps room for it until then.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from staleflow.coordination.routing import KV_HEADROOM, has_room
from staleflow.coordination.snapshot import Resident
from staleflow.coordination.speculative import IdentityCache, InstanceState, SpeculativeState

_waiting = attrgetter("waiting")
_leaving = attrgetter("leaving")

MOST_CONSIDERED = 256
"""Running trajectories that one cycle considers; the rest follow in later cycles."""
MOST_FRUITLESS = 2
"""Consecutive moves without a new token after which a waiting trajectory stays where it is."""


class MigrationStrategy(Protocol):
    """Orders Interrupts through the speculative state."""

    def migrate(self, state: SpeculativeState) -> float | None:
        """Order the Interrupts that pay now. Returns when to decide again if no event comes first."""
        ...


class NaiveMigration:
    """A trajectory stays where it started."""

    def migrate(self, state: SpeculativeState) -> float | None:
        """Order nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """When trajectories move."""

    phi_wait: int = 3
    """φ_wait: trajectories that may wait in an instance's own queue before some are moved."""
    psi_throughput: float = 5.0
    """ψ: ratio of the fastest to the slowest instance's throughput above which running trajectories move."""
    rest_s: float = 2.0
    """Seconds after a Route in which a trajectory does not move."""
    kv_headroom: float = KV_HEADROOM
    longest_response: int | None = None
    """Tokens after which every response ends, so one near the limit has little left. None: no known limit."""


class CostAwareMigration:
    """Waiting trajectories leave long queues, running ones slow instances, if the saving exceeds the cost.

    - *Waiting*: if more than φ_wait trajectories wait in an instance's own queue (or any, if another instance
      is empty), as many leave as other instances have room for, last arrivals first. They hold no KV, so
      moving costs no more than staying.
    - *Running*: if T of the fastest instance exceeds ψ times that of the slowest, or an instance is idle, a
      trajectory moves if the extra tokens of both instances, over its expected remaining time, exceed the
      tokens lost to the prefill on the target.
    - No ping-pong: a running trajectory rests for `rest_s` after each Route and moves only after it has
      gained a token there; a waiting one moves at most `MOST_FRUITLESS` times in a row without gaining any.
      No wave starts before the trajectories of the last one have left.
    """

    def __init__(self, settings: MigrationSettings | None = None) -> None:
        self._settings = settings or MigrationSettings()
        self._throughputs: IdentityCache[InstanceState, float] = IdentityCache()

    def migrate(self, state: SpeculativeState) -> float | None:
        """Order moves of waiting trajectories; if there are none, moves of running ones."""
        under_way = any(map(_leaving, state.instances.values()))
        if len(state.instances) < 2 or under_way or self._relieve_queues(state):
            return None
        return self._close_gaps(state)

    # ------------------------------------------------------------------ waiting

    def _relieve_queues(self, state: SpeculativeState) -> bool:
        if not any(map(_waiting, state.instances.values())):
            return False
        phi = self._settings.phi_wait
        if any(s.resident == 0 for s in state.instances.values()):
            phi = 0  # running there beats waiting here
        crowded = [s for s in state.instances.values() if s.waiting > phi]
        if not crowded:
            return False
        targets = _Targets(state, self._settings.kv_headroom)
        before = len(state.commands)
        for source in sorted(crowded, key=lambda s: (-s.waiting, s.instance)):
            queued = state.snapshot.resident(source.instance)[-source.waiting :]
            for resident in reversed(queued[phi:]):
                if not self._take_from_queue(state, targets, source, resident):
                    break
        return len(state.commands) > before

    def _take_from_queue(
        self, state: SpeculativeState, targets: _Targets, source: InstanceState, resident: Resident
    ) -> bool:
        """Move one trajectory out of an instance's own queue. False: no instance has room for it."""
        if resident.leaving or resident.fruitless >= MOST_FRUITLESS:
            return True
        source = state.instances[source.instance]  # after earlier moves
        target = targets.peek(source, resident)
        if target is None:
            return False
        targets.promise(target, resident)
        reason = f"migration: {source.waiting} wait on {source.instance}, {target.instance} has room"
        state.interrupt(resident.trajectory_id, 0, source.instance, reason, target=target.instance)
        return True

    # ------------------------------------------------------------------ running

    def _close_gaps(self, state: SpeculativeState) -> float | None:
        costs = state.snapshot.costs
        throughputs = self._throughputs.of(
            state.instances, lambda s: costs.throughput(s.running, s.kv_tokens), costs
        ).values()
        fastest, slowest = max(throughputs), min(throughputs)
        if fastest == 0 or fastest <= self._settings.psi_throughput * slowest:
            return None
        targets = _Targets(state, self._settings.kv_headroom)
        considered = 0
        rested: list[float] = []
        for source in sorted(state.instances.values(), key=lambda s: (-s.running, s.instance)):
            if source.running < 2 or not targets or considered == MOST_CONSIDERED:
                break  # a single trajectory cannot run faster elsewhere
            for resident in self._running(state, source):
                if not targets or considered == MOST_CONSIDERED:
                    break
                rests_until = resident.routed_at + self._settings.rest_s
                if resident.leaving or resident.length <= resident.routed_length:
                    continue
                if rests_until > state.snapshot.now:
                    rested.append(rests_until)
                    continue
                considered += 1
                self._move_if_it_pays(state, targets, source, resident)
        return min(rested, default=None)

    def _running(self, state: SpeculativeState, source: InstanceState) -> tuple[Resident, ...]:
        residents = state.snapshot.resident(source.instance)
        return residents[: len(residents) - source.waiting]

    def _move_if_it_pays(
        self, state: SpeculativeState, targets: _Targets, source: InstanceState, resident: Resident
    ) -> None:
        source = state.instances[source.instance]  # after earlier moves
        target = targets.peek(source, resident)
        if target is None:
            return
        saving, cost = self._balance(state, source, target, resident)
        if saving <= cost:
            return
        reason = (
            f"migration: {target.running} run on {target.instance}, {source.running} on {source.instance}; "
            f"saves {saving:.4g} tokens for {cost:.4g}"
        )
        targets.promise(target, resident)
        state.interrupt(
            resident.trajectory_id, resident.length, source.instance, reason, target=target.instance
        )

    def _balance(
        self, state: SpeculativeState, source: InstanceState, target: InstanceState, resident: Resident
    ) -> tuple[float, float]:
        """(saving, cost) of a move, in tokens."""
        costs, length = state.snapshot.costs, resident.length
        gain = costs.gain(target.running, target.kv_tokens, length)
        others = max(0, source.kv_tokens - length)  # the engine holds less if it has lost the trajectory
        loss = costs.gain(source.running - 1, others, length)
        # Lengths are long-tailed: a trajectory that has run long is expected to run as long again.
        left = max(state.snapshot.expected_growth - resident.response, resident.response)
        if self._settings.longest_response is not None:
            left = min(left, self._settings.longest_response - resident.response)
        left = max(left, 1)
        seconds = left * costs.step_s(target.running + 1, target.kv_tokens + length)
        target_rate = costs.throughput(target.running, target.kv_tokens)
        source_rate = 1 / costs.step_s(source.running, source.kv_tokens)
        return (gain - loss) * seconds, (target_rate + source_rate) * costs.prefill_s(length)


class _Targets:
    """Instances that can take more, least loaded first, including what this wave has promised them."""

    def __init__(self, state: SpeculativeState, headroom: float) -> None:
        self._state = state
        self._headroom = headroom
        self._open = [i for i in state.instances.values() if not i.waiting and self._fits(i, 0)]
        self._open.sort(key=_load)

    def __len__(self) -> int:
        return len(self._open)

    def peek(self, source: InstanceState, resident: Resident) -> InstanceState | None:
        """The least loaded instance that may take the trajectory and runs fewer than the source."""
        for instance in self._open:
            if instance.running + 1 >= source.resident:
                return None
            if (
                instance.instance != source.instance
                and self._state.admits_reserved(resident.group_version, instance.version)
                and self._fits(instance, resident.length)
            ):
                return instance
        return None

    def promise(self, instance: InstanceState, resident: Resident) -> None:
        """Count the trajectory on the instance."""
        self._open.remove(instance)
        promised = instance.copy()
        promised.resident += 1
        promised.kv_tokens += resident.length
        if self._fits(promised, 0):
            insort(self._open, promised, key=_load)

    def _fits(self, instance: InstanceState, length: int) -> bool:
        return has_room(instance, length, self._state.snapshot.expected_held, self._headroom)


def _load(instance: InstanceState) -> tuple[int, int, str]:
    return instance.running, instance.kv_tokens, instance.instance
