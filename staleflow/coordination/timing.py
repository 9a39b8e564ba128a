"""Time as `Control` knows it: the present cycle, when the next one is due, and what is overdue."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable


class CycleClock:
    """The time of the last cycle, and when the next one is due."""

    __slots__ = ("now", "urgent", "wake_at")

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the last cycle, in seconds on the caller's clock."""
        self.urgent = False
        """Work is blocked until the next cycle, which should come at once."""
        self.wake_at: float | None = None
        """When the next cycle is due without further events; None: only an event changes anything."""


class ProgressWatch:
    """Ids by the time of their last progress, oldest first; each operation is O(1).

    With an infinite limit nothing is ever overdue, and nothing is watched.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: OrderedDict[str, float] = OrderedDict()

    def touch(self, key: str, now: float) -> None:
        """`key` made progress at `now`, which never decreases between calls."""
        if self._limit_s == math.inf:
            return
        self._last[key] = now
        self._last.move_to_end(key)

    def touch_all(self, keys: Iterable[str], now: float) -> None:
        """All of these made progress at `now`."""
        if self._limit_s == math.inf:
            return
        last, to_end = self._last, self._last.move_to_end
        for key in keys:
            last[key] = now
            to_end(key)

    def forget(self, key: str) -> None:
        """Stop watching `key`, if it is watched."""
        self._last.pop(key, None)

    def overdue(self, now: float) -> list[str]:
        """Ids without progress for the limit; they are not watched again until touched."""
        late: list[str] = []
        while self._last:
            key, last = next(iter(self._last.items()))
            if now - last < self._limit_s:
                break
            del self._last[key]
            late.append(key)
        return late


class Deadlines:
    """Ids with a time limit each; adding and expiring are O(log n)."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, due: float) -> None:
        """`key` expires at `due`, unless it is forgotten or set again."""
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))

    def forget(self, key: str) -> None:
        """`key` no longer expires."""
        self._due.pop(key, None)

    def expired(self, now: float) -> list[str]:
        """Ids whose time is up; they are forgotten."""
        late: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                late.append(key)
        return late
