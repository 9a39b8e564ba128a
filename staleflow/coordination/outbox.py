"""What `Control` has decided and not handed out yet. The one place where ledger records get their numbers."""

from __future__ import annotations

from staleflow.coordination.actions import Action, Append
from staleflow.protocol.records import Record


class Outbox:
    """Effects in order. Record numbers are consecutive, from `next_seq` on."""

    def __init__(self, *, attempt: int, next_seq: int) -> None:
        self._attempt = attempt
        self._next_seq = next_seq
        self._actions: list[Action] = []

    def record(self, record: Record) -> None:
        """Number a record and have it appended to the ledger."""
        self._actions.append(Append(self._next_seq, self._attempt, record))
        self._next_seq += 1

    def put(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def take(self) -> list[Action]:
        """All actions since the last call."""
        actions, self._actions = self._actions, []
        return actions
