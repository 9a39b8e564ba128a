"""Where rows go. A sink only ever appends: a row once written is never changed by a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


SINKS = {"jsonl": "staleflow.telemetry.jsonl.JsonlSink"}
"""Sinks by name that a config may add; a dotted path of one's own is as good."""


class GuardedSink:
    """A sink that may fail without ending the run: it says so once, and gets no further row."""

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], None]) -> None:
        """`warn` takes one sentence."""
        self._name = name
        self._sink: Sink | None = sink
        self._warn = warn

    def write(self, row: Row) -> None:
        """Record one row, if it has not failed."""
        if self._sink is not None:
            self._try(self._sink, lambda sink: sink.write(row))

    def close(self) -> None:
        """Close it, if it has not failed."""
        if self._sink is not None:
            self._try(self._sink, lambda sink: sink.close())

    def _try(self, sink: Sink, do: Callable[[Sink], None]) -> None:
        try:
            do(sink)
        except Exception as error:
            self._sink = None
            self._warn(
                f"the metric sink {self._name} failed and gets no further rows: "
                f"{type(error).__name__}: {error}"
            )


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
