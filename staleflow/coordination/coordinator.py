"""The coordinator: snapshot in, commands out. No I/O, and no clock but the snapshot's time stamp.

Order of a step: synchronize, then route (a pull may have unlocked it), then migrate, and only when nothing
was pulled, for a pull changes the picture that migration is decided on.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.coordination.commands import Command, Pull
from staleflow.coordination.migration import MigrationStrategy
from staleflow.coordination.routing import RoutingStrategy
from staleflow.coordination.snapshot import InstanceView, Snapshot
from staleflow.coordination.speculative import InstanceState, SpeculativeState, speculate
from staleflow.coordination.synchronization import SynchronizationStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step decided."""

    commands: tuple[Command, ...]
    wake_at: float | None = None
    """Time of the next step if nothing happens before; None: only an event can change the decision."""


class Coordinator:
    """Three strategies over one speculative state."""

    def __init__(
        self,
        *,
        routing: RoutingStrategy,
        synchronization: SynchronizationStrategy,
        migration: MigrationStrategy,
    ) -> None:
        self._routing = routing
        self._synchronization = synchronization
        self._migration = migration
        self._cache: dict[str, tuple[tuple[int, int, int, int], InstanceState]] = {}

    def step(self, snapshot: Snapshot) -> Decision:
        """Decide on this snapshot. Nothing in it is changed."""
        state = SpeculativeState(snapshot, self._instances(snapshot))
        self._synchronization.synchronize(state)
        self._routing.route(state)
        if not any(isinstance(command, Pull) for command in state.commands):
            self._migration.migrate(state)
        return Decision(commands=tuple(state.commands))

    def _instances(self, snapshot: Snapshot) -> dict[str, InstanceState]:
        """Speculative states, re-read only for instances whose view changed since the last step."""
        if len(self._cache) > len(snapshot.instances):
            self._cache = {k: v for k, v in self._cache.items() if k in snapshot.instances}
        return {name: self._instance(name, view) for name, view in snapshot.instances.items()}

    def _instance(self, name: str, view: InstanceView) -> InstanceState:
        key = (view.snapshot.incarnation, view.snapshot.revision, view.next_seq, len(view.outstanding))
        known = self._cache.get(name)
        if known is None or known[0] != key:
            known = (key, speculate(view))
            self._cache[name] = known
        return known[1]
