"""Where rows go. A sink only ever appends: a row once written is never changed by a later one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Protocol

from staleflow.telemetry.rows import Row


class Sink(Protocol):
    """Takes every row of a run, in the order in which they were made."""

    def write(self, row: Row) -> None:
        """Record one row."""
        ...

    def close(self) -> None:
        """Flush and free; may be called twice."""
        ...


class Fanout:
    """Several sinks as one: each row goes to every sink, and closing closes all even where one fails."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, row: Row) -> None:
        """Record one row in every sink, in the order in which they were given."""
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Close every sink; the first error is raised once all were tried."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)
