"""The virtual clock, and what is foreseen to happen.

Invariants: time never goes back; what happens at one moment happens in the order in which it was foreseen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """A heap by time. Seconds from the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.until = 0.0
        """Nothing later happens in `go_on`; what happens may bring it nearer."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def foresee(self, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        """Call `happen` with these arguments at `at`."""
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, happen, arguments))

    def go_on(self) -> None:
        """Let one thing after the other happen."""
        heap = self._heap
        while heap and heap[0][0] <= self.until:
            self.now, _, happen, arguments = heapq.heappop(heap)
            happen(*arguments)
