"""The virtual clock, and what happens next on it.

Invariants: time never goes back; what happens at one moment happens in the order in which it was scheduled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sized
from typing import Any


class EventQueue:
    """A heap by time. Seconds from the start of the run."""

    def __init__(self) -> None:
        self.time = 0.0
        """Simulated seconds from the start."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def schedule(self, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        """Call `happen` with these arguments at `at`."""
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, happen, arguments))

    @property
    def is_due(self) -> bool:
        """Whether something more happens at this moment."""
        return bool(self._heap) and self._heap[0][0] <= self.time

    def advance(self, until: float, news: Sized) -> None:
        """Let one thing after the other happen until there is news. Without any by `until`, the clock reads
        `until` at the end, unless that is infinite.
        """
        heap, pop = self._heap, heapq.heappop
        while not news and heap and heap[0][0] <= until:
            self.time, _, happen, arguments = pop(heap)
            happen(*arguments)
        if not news and self.time < until < math.inf:
            self.time = until

    # ------------------------------------------------------------------ the run's clock

    def now(self) -> float:
        """The same."""
        return self.time

    def wall(self) -> float:
        """The same: a simulated run is repeated to the bit."""
        return self.time

    def cpu(self) -> float:
        """The same: deciding takes no simulated time."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Simulated time passes by what happens only."""
        raise RuntimeError("simulated time passes by events only")
