"""Who has not moved for too long."""

from __future__ import annotations

from collections import OrderedDict


class ProgressWatch:
    """Ids by the time of their last progress, oldest first; each operation is O(1)."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: OrderedDict[str, float] = OrderedDict()

    def touch(self, key: str, now: float) -> None:
        """`key` made progress at `now` (never earlier than the last call's)."""
        self._last[key] = now
        self._last.move_to_end(key)

    def forget(self, key: str) -> None:
        """Stop watching `key`, if it is watched."""
        self._last.pop(key, None)

    def overdue(self, now: float) -> list[str]:
        """Those without progress for the limit; they are not watched any more until touched again."""
        late: list[str] = []
        while self._last:
            key, last = next(iter(self._last.items()))
            if now - last < self._limit_s:
                break
            del self._last[key]
            late.append(key)
        return late
