"""The ledger file: an append-only log of protocol records, one JSON line each.

Invariants:

- a record is whole or absent: readers and the next writer ignore a line without its newline (the process
  died while writing), whatever its text;
- records appended before `flush` returned survive the death of this process by any signal, and with
  `sync=True` a crash of the machine;
- whole lines are never rewritten: opening an existing ledger removes only its torn tail.

The caller provides sequence numbers; `staleflow.protocol.records` defines the lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from staleflow.errors import RunFolderError
from staleflow.protocol.records import Record, from_json, to_json

_BUFFER_BYTES = 1 << 16
"""Bytes buffered before a write to the operating system, without `flush`."""
_TAIL_BYTES = 1 << 16
"""Bytes per read when searching backwards for the last newline."""


class LedgerWriter:
    """Appends records to a ledger file. One writer per file, ensured by the run folder's lock."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; create it if needed, and cut off a torn last line.

        Raises RunFolderError if the file cannot be opened.
        """
        try:
            self._file = path.open("a+b", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise RunFolderError(f"cannot write the ledger {path}: {error.strerror}") from error
        self._file.truncate(whole_bytes(path))

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Append one record; it is safe only after the next `flush`."""
        self._file.write(to_json(record, seq, attempt).encode() + b"\n")

    def flush(self, *, sync: bool = False) -> None:
        """Write all appended records to the operating system, and with `sync` to the disk."""
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self._file.close()

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Yield (seq, attempt, record) of each whole line, in order; skips a torn last line.

    Raises RunFolderError, with file and line, if a whole line is not a record or the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield from_json(line)
                except ValueError as error:
                    raise RunFolderError(f"{path}, line {number}: not a ledger record ({error})") from error
    except OSError as error:
        raise RunFolderError(f"cannot read the ledger {path}: {error.strerror}") from error


def whole_bytes(path: Path) -> int:
    """Length of the file up to and including its last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
