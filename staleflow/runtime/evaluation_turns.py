"""Selects and orders the weight versions to evaluate: one at a time, without delaying training.

::

    due ──> waiting (at most `backlog`) ──> under way (one) ──> done
               └──> skipped: the oldest waiting one, if a newer one needs the room

Invariants: at most `backlog + 1` versions are kept alive for evaluation, however slow it is, so their weights
cannot fill the memory; the newest requested version is never skipped, so the last one of a run is always
evaluated; a version under way or waiting is not queued twice.
"""

from __future__ import annotations

from collections import deque


class EvaluationTurns:
    """`every`: training steps between evaluations, 0: no evaluation; `steps`: the last version of the run;
    `backlog`: at least 1.
    """

    def __init__(self, *, every: int, steps: int, backlog: int) -> None:
        self._every = every
        self._steps = steps
        self._backlog = backlog
        self._waiting: deque[int] = deque()
        self._under_way: int | None = None

    def is_due(self, version: int) -> bool:
        """Whether a version should be evaluated."""
        return bool(self._every) and (version % self._every == 0 or version >= self._steps)

    @property
    def are_left(self) -> bool:
        """Whether an evaluation is under way or waiting."""
        return self._under_way is not None

    def ask(self, version: int) -> int | None:
        """Queue a version; returns the version skipped for it, if any. `start` returns the one to begin."""
        if version == self._under_way or version in self._waiting:
            return None
        self._waiting.append(version)
        return self._waiting.popleft() if len(self._waiting) > self._backlog else None

    def start(self) -> int | None:
        """Take the version to evaluate now; None if one is under way or none waits."""
        if self._under_way is not None or not self._waiting:
            return None
        self._under_way = self._waiting.popleft()
        return self._under_way

    def done(self, version: int) -> None:
        """Note that the evaluation of `version` has ended."""
        if version == self._under_way:
            self._under_way = None
