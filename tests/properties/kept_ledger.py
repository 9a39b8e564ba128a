"""A ledger in memory, which knows what a crash of the process or of the machine would leave of it."""

from __future__ import annotations

from staleflow.protocol.records import Record, to_json


class KeptLedger:
    """Lines and records, in order. Their numbers have no gap."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[Record] = []
        self._flushed = 0
        self._synced = 0

    @property
    def flushed(self) -> list[Record]:
        """What the operating system has."""
        return self.records[: self._flushed]

    @property
    def synced(self) -> list[Record]:
        """What the disk has."""
        return self.records[: self._synced]

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Append a record."""
        assert seq == len(self.lines), "a number was skipped or came twice"
        self.lines.append(to_json(record, seq, attempt))
        self.records.append(record)

    def flush(self, *, sync: bool = False) -> None:
        """See `Ledger`."""
        self._flushed = len(self.records)
        if sync:
            self._synced = self._flushed

    def close(self) -> None:
        """Flush."""
        self.flush()
