"""Migration: which running trajectory is interrupted, to go on elsewhere."""

from __future__ import annotations

from typing import Protocol

from staleflow.coordination.speculative import SpeculativeState


class MigrationStrategy(Protocol):
    """Orders Interrupts through the speculative state."""

    def migrate(self, state: SpeculativeState) -> None:
        """Order the Interrupts that pay now."""
        ...


class NaiveMigration:
    """A trajectory stays where it was started."""

    def migrate(self, state: SpeculativeState) -> None:
        """Order nothing."""


MIGRATION: dict[str, type[MigrationStrategy]] = {"naive": NaiveMigration}
"""`coordination.migration.strategy`."""
