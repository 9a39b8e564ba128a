"""Routing: which waiting trajectory goes to which instance."""

from __future__ import annotations

from typing import Protocol

from staleflow.coordination.pending import PendingTrajectory
from staleflow.coordination.speculative import InstanceState, SpeculativeState

KV_HEADROOM = 0.1
"""Share of the KV cache left free, because lengths are only expected ones."""


class RoutingStrategy(Protocol):
    """Orders Routes through the speculative state."""

    def route(self, state: SpeculativeState) -> None:
        """Order as many Routes as make sense now."""
        ...


class NaiveRouting:
    """Least loaded: oldest reservation first, each to the admissible instance with the fewest trajectories.

    Among equally loaded instances the one that was routed to least recently is taken, so that ties
    do not all fall on the first. An instance whose version would lower the group's V is the second choice.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def route(self, state: SpeculativeState) -> None:
        """Route every waiting trajectory that some instance has room for and the protocol admits."""
        fresh_blocked = False
        for item in state.snapshot.pending:
            fresh = state.group_version(item) is None
            if fresh and fresh_blocked:
                continue
            open_instances = [
                s
                for s in state.instances.values()
                if has_room(s, item.length, state.snapshot.expected_growth)
            ]
            if not open_instances:
                return
            chosen = self._choose(state, item, open_instances)
            if chosen is not None:
                self._turn += 1
                self._last_turn[chosen] = self._turn
                state.route(item, chosen, "least loaded")
            elif fresh:
                fresh_blocked = True  # all groups without a reservation need the same admission

    def _choose(
        self, state: SpeculativeState, item: PendingTrajectory, candidates: list[InstanceState]
    ) -> str | None:
        admissible = [s for s in candidates if state.admits(item, s.version)]
        if not admissible:
            return None
        group_version = state.group_version(item)

        def preference(s: InstanceState) -> tuple[bool, int, int]:
            lowers = group_version is not None and s.version < group_version
            return lowers, s.resident, self._last_turn.get(s.instance, 0)

        return min(admissible, key=preference).instance


def has_room(state: InstanceState, length: int, expected_growth: int) -> bool:
    """Whether the instance can hold one more trajectory with the growth that all there are expected to have.

    An empty instance takes anything: whatever fits a KV cache at all must be able to run somewhere.
    """
    if state.resident == 0:
        return True
    if state.resident >= state.max_running:
        return False
    expected = state.kv_tokens + length + expected_growth * (state.resident + 1)
    return expected <= (1 - KV_HEADROOM) * state.kv_capacity


ROUTING: dict[str, type[RoutingStrategy]] = {"naive": NaiveRouting}
"""`coordination.routing.strategy`."""
