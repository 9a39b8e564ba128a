"""Synchronization: which instance pulls the newest weights, and when."""

from __future__ import annotations

from typing import Protocol

from staleflow.coordination.speculative import SpeculativeState


class SynchronizationStrategy(Protocol):
    """Orders Pulls through the speculative state."""

    def synchronize(self, state: SpeculativeState) -> None:
        """Order the Pulls that pay now."""
        ...


class NaiveSynchronization:
    """Every instance pulls as soon as there is something newer than what it has."""

    def synchronize(self, state: SpeculativeState) -> None:
        """Order a Pull for each instance behind the newest version."""
        newest = state.snapshot.newest_version
        for instance in list(state.instances):
            if state.instances[instance].version < newest:
                state.pull(instance, f"version {newest} is out")


SYNCHRONIZATION: dict[str, type[SynchronizationStrategy]] = {"naive": NaiveSynchronization}
"""`coordination.synchronization.strategy`."""
