"""Time, passed in. Nothing else in the runtime asks the operating system for it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Three readings and a pause."""

    def now(self) -> float:
        """Seconds that never go backwards, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch."""
        ...

    def cpu(self) -> float:
        """Seconds that this thread has computed, from an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let that much time pass."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def cpu(self) -> float:
        """Of the calling thread: what other processes do on the same cores is not counted."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Block the thread."""
        time.sleep(seconds)


class VirtualClock:
    """Time that passes only when somebody sleeps: a run on it is repeated to the bit."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def wall(self) -> float:
        """Virtual seconds, too."""
        return self._now

    def cpu(self) -> float:
        """Virtual seconds: computing takes none."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance, at once."""
        self._now += seconds
