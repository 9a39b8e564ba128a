"""The coordinator: snapshot in, commands out. No I/O, and no clock but the snapshot's time stamp.

Order of a step: synchronize, then route (a pull may have unlocked it), then migrate. Migration runs only if
nothing was pulled, because a pull changes the state that migration decides on. Trajectories that routing
leaves waiting may require further pulls; another step follows those at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staleflow.coordination.actions import Command
from staleflow.coordination.migration import MigrationStrategy
from staleflow.coordination.routing import RoutingStrategy
from staleflow.coordination.snapshot import InstanceView, Snapshot
from staleflow.coordination.speculative import IdentityCache, InstanceState, SpeculativeState, speculate
from staleflow.coordination.synchronization import SynchronizationStrategy

AdmissionRule = Callable[[Snapshot], int | None]
"""Most groups to reserve in this cycle; None: as many as the protocol admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of one step."""

    commands: tuple[Command, ...]
    wake_at: float | None = None
    """Time of the next step if no event comes first; None: only an event can change the decision."""


class Coordinator:
    """Three strategies over one speculative state, and a rule that limits new groups."""

    def __init__(
        self,
        *,
        routing: RoutingStrategy,
        synchronization: SynchronizationStrategy,
        migration: MigrationStrategy,
        admission: AdmissionRule | None = None,
    ) -> None:
        self._routing = routing
        self._synchronization = synchronization
        self._migration = migration
        self._admission = admission
        self._states: IdentityCache[InstanceView, InstanceState] = IdentityCache()

    def step(self, snapshot: Snapshot) -> Decision:
        """Decide on this snapshot without changing it."""
        fresh_groups = self._admission(snapshot) if self._admission is not None else None
        states = dict(self._states.of(snapshot.instances, speculate))
        state = SpeculativeState(snapshot, states, fresh_groups)
        self._hold_room(state)
        self._synchronization.synchronize(state)
        self._routing.route(state)
        if self._synchronization.after_routing(state):
            return Decision(commands=tuple(state.commands), wake_at=snapshot.now)
        wake_at = None if state.pulled else self._migration.migrate(state)
        return Decision(commands=tuple(state.commands), wake_at=wake_at)

    def _hold_room(self, state: SpeculativeState) -> None:
        """Reserve room on the target of each migration whose trajectory is not back yet.

        Except on an idle target: it takes whatever can run now.
        """
        for command in [c for source in state.instances.values() for c in source.leaving]:
            target = state.instances.get(command.target)
            if target is not None and target.resident:
                state.hold(command.target, command.length or state.snapshot.expected_held)
