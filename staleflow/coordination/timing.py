"""Time as `Control` knows it: the present cycle, when the next one is due, and what is overdue."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict


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

    Events carry no time, and the last cycle may be long ago: progress counts from the cycle that follows it.
    With an infinite limit nothing is ever overdue, and nothing is watched.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: OrderedDict[str, float] = OrderedDict()
        self._since_cycle: dict[str, None] = {}

    def touch(self, *keys: str) -> None:
        """These made progress since the last cycle, or in this one."""
        if self._limit_s < math.inf:
            self._since_cycle.update(dict.fromkeys(keys))

    def forget(self, key: str) -> None:
        """Stop watching `key`, if it is watched."""
        self._last.pop(key, None)
        self._since_cycle.pop(key, None)

    def stamp(self, now: float) -> None:
        """It is `now`, which never decreases between calls: what was touched made progress."""
        last, to_end = self._last, self._last.move_to_end
        for key in self._since_cycle:
            last[key] = now
            to_end(key)
        self._since_cycle.clear()

    @property
    def next_due(self) -> float:
        """When the first id is overdue; inf: none is watched."""
        return next(iter(self._last.values())) + self._limit_s if self._last else math.inf

    def overdue(self, now: float) -> list[str]:
        """Ids without progress for the limit; they are not watched again until touched."""
        self.stamp(now)
        late: list[str] = []
        while self._last:
            key, last = next(iter(self._last.items()))
            if now < last + self._limit_s:  # as in `next_due`: `now - last` may round to less
                break
            del self._last[key]
            late.append(key)
        return late


class Deadlines:
    """Ids with a time limit each, from the cycle that follows; adding and expiring are O(log n)."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._since_cycle: dict[str, float] = {}

    def set(self, key: str, limit_s: float) -> None:
        """`key` expires `limit_s` after the next cycle, unless it is forgotten or set again."""
        self._since_cycle[key] = limit_s

    def forget(self, key: str) -> None:
        """`key` no longer expires."""
        self._due.pop(key, None)
        self._since_cycle.pop(key, None)

    @property
    def next_due(self) -> float:
        """When the first id may expire; inf: none does."""
        return self._heap[0][0] if self._heap else math.inf

    def expired(self, now: float) -> list[str]:
        """Ids whose time is up; they are forgotten."""
        for key, limit_s in self._since_cycle.items():
            self._due[key] = now + limit_s
            heapq.heappush(self._heap, (now + limit_s, key))
        self._since_cycle.clear()
        late: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                late.append(key)
        return late
