"""What `Control` has decided and not handed out yet. The one place where ledger records get their numbers."""

from __future__ import annotations

from staleflow.coordination.effects import Append, Effect
from staleflow.protocol.records import Record


class Outbox:
    """Effects in order. Record numbers are consecutive, from `next_seq` on."""

    def __init__(self, *, attempt: int, next_seq: int) -> None:
        self._attempt = attempt
        self._next_seq = next_seq
        self._effects: list[Effect] = []

    def record(self, record: Record) -> None:
        """Number a record and have it appended to the ledger."""
        self._effects.append(Append(self._next_seq, self._attempt, record))
        self._next_seq += 1

    def put(self, effect: Effect) -> None:
        """Add an effect."""
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        """All effects since the last call."""
        effects, self._effects = self._effects, []
        return effects
