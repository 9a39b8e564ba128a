"""The coordinator: snapshot in, commands out. No I/O, and no clock but the snapshot's time stamp.

Order of a step: synchronize, then route (a pull may have unlocked it), then migrate, and only when nothing
was pulled, for a pull changes the picture that migration is decided on. What routing leaves over may call for
further pulls; another step follows them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staleflow.coordination.commands import Command
from staleflow.coordination.identity_cache import Kept
from staleflow.coordination.migration import MigrationStrategy
from staleflow.coordination.routing import RoutingStrategy
from staleflow.coordination.snapshot import InstanceView, Snapshot
from staleflow.coordination.speculative import InstanceState, SpeculativeState, speculate
from staleflow.coordination.synchronization import SynchronizationStrategy

Admission = Callable[[Snapshot], int | None]
"""How many groups may be reserved in this cycle; None: as many as the protocol admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step decided."""

    commands: tuple[Command, ...]
    wake_at: float | None = None
    """Time of the next step if nothing happens before; None: only an event can change the decision."""


class Coordinator:
    """Three strategies over one speculative state, and a rule for how much may start."""

    def __init__(
        self,
        *,
        routing: RoutingStrategy,
        synchronization: SynchronizationStrategy,
        migration: MigrationStrategy,
        admission: Admission | None = None,
    ) -> None:
        self._routing = routing
        self._synchronization = synchronization
        self._migration = migration
        self._admission = admission
        self._states: Kept[InstanceView, InstanceState] = Kept()

    def step(self, snapshot: Snapshot) -> Decision:
        """Decide on this snapshot. Nothing in it is changed."""
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
        """Count what migration has interrupted, and is not back yet, where it is to go on.

        Not where nothing runs: an idle instance waits for nobody.
        """
        for command in [c for source in state.instances.values() for c in source.leaving]:
            target = state.instances.get(command.target)
            if target is not None and target.resident:
                state.hold(command.target, command.length or state.snapshot.expected_held)
