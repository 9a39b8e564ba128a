"""Which weight versions are evaluated, and in what order: one at a time, never in the way of training.

::

    due ──> waiting (at most `backlog`) ──> under way (one) ──> done
               └──> skipped: the oldest waiting one, when there is no room for a newer

Invariants: at most `backlog + 1` versions are kept alive for evaluation, however slow it is, so that its
weights cannot fill the memory; the newest version that was asked for is never skipped, so that the last one
of a run is always evaluated; a version under way or waiting is not taken twice.
"""

from __future__ import annotations

from collections import deque


class EvaluationTurns:
    """`every`: training steps between evaluations, 0: none; `steps`: the version that ends the run; `backlog`
    is at least 1.
    """

    def __init__(self, *, every: int, steps: int, backlog: int) -> None:
        self._every = every
        self._steps = steps
        self._backlog = backlog
        self._waiting: deque[int] = deque()
        self._under_way: int | None = None

    def is_due(self, version: int) -> bool:
        """Whether a version is one of those to evaluate."""
        return bool(self._every) and (version % self._every == 0 or version >= self._steps)

    @property
    def are_left(self) -> bool:
        """Whether one is under way or waiting."""
        return self._under_way is not None

    def ask(self, version: int) -> int | None:
        """Take a version in; returns the version that is skipped for it. `start` says what to begin."""
        if version == self._under_way or version in self._waiting:
            return None
        self._waiting.append(version)
        return self._waiting.popleft() if len(self._waiting) > self._backlog else None

    def start(self) -> int | None:
        """The version to begin with now; None while one is under way, or none waits."""
        if self._under_way is not None or not self._waiting:
            return None
        self._under_way = self._waiting.popleft()
        return self._under_way

    def done(self, version: int) -> None:
        """An evaluation came in."""
        if version == self._under_way:
            self._under_way = None
