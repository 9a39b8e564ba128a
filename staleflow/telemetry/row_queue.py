"""Rows on their way from the run loop to the sinks, which take them from another thread at their own pace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from staleflow.telemetry.rows import Row, RowKind


class RowQueue:
    """Rows of one attempt, each with its time."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        """`now`: the run's clock; `wall`: seconds since the epoch."""
        self._now = now
        self._wall = wall
        self.began = now()
        """Where `run/seconds` counts from."""
        self._rows: list[Row] = []
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Since the attempt began."""
        return self._now() - self.began

    def add(self, kind: RowKind, values: Mapping[str, float | int | str]) -> None:
        """A row of this moment; `run/seconds` is added."""
        row = Row(kind=kind, time=self._wall(), values={**values, "run/seconds": self.seconds()})
        with self._lock:
            self._rows.append(row)

    def take(self) -> list[Row]:
        """Rows since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows
