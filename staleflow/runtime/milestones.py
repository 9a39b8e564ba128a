"""What follows some of the training steps: checkpoints and evaluations, beside the steps after them.

Invariants: a checkpoint never outlives the records of its steps; a version is evaluated once at most; a
version that is held for its evaluation is let go when it is evaluated or skipped.
"""

from __future__ import annotations

from typing import Any

from staleflow.runtime.backend import Backend, Ledger
from staleflow.runtime.evaluation_turns import EvaluationTurns
from staleflow.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    EvaluationSkipped,
    EventStream,
)


class Checkpoints:
    """`every`: training steps between checkpoints; 0: only at the end; None: never."""

    def __init__(
        self, backend: Backend[Any, Any], ledger: Ledger, stream: EventStream, *, every: int | None
    ) -> None:
        self._backend = backend
        self._ledger = ledger
        self._stream = stream
        self._every = every
        self._saving: set[int] = set()
        self._saved = -1

    def trained(self, version: int) -> None:
        """A step has made this version: save it if it is due."""
        if self._every and version % self._every == 0:
            self._save(version)

    def ended(self, version: int) -> bool:
        """Training is over at this version: save it, unless it is saved. Returns whether it was to be."""
        missing = self._every is not None and self._saved < version
        if missing:
            self._save(version)
        return missing

    def saved(self, message: CheckpointSaved) -> None:
        """A checkpoint is whole."""
        self._saving.discard(message.version)
        self._saved = message.version
        self._stream.tell(message)

    @property
    def under_way(self) -> bool:
        """A checkpoint is being written."""
        return bool(self._saving)

    def _save(self, version: int) -> None:
        if version not in self._saving:
            self._saving.add(version)
            self._ledger.flush(sync=True)
            self._backend.save(version)


class Evaluations:
    """See `EvaluationTurns` for the arguments."""

    def __init__(
        self, backend: Backend[Any, Any], stream: EventStream, *, every: int, steps: int, backlog: int
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._every = every
        self._steps = steps
        self._turns = EvaluationTurns(every=every, steps=steps, backlog=backlog)
        self._newest = -1
        """The newest version that was evaluated."""

    def is_due(self, version: int) -> bool:
        """Whether a version is to be held for its evaluation."""
        return self._turns.is_due(version)

    def began(self, version: int) -> None:
        """The run begins with these weights."""
        if self._every and version < self._steps:
            self._evaluate(version)

    def pushed(self, version: int) -> None:
        """The weights of a step are in the parameter server."""
        if self._turns.is_due(version):
            self._evaluate(version)

    def ended(self, version: int) -> None:
        """Training is over at this version."""
        if self._every and self._newest < version:
            self._evaluate(version)

    def done(self, message: Evaluated | EvaluationFailed) -> None:
        """An evaluation has ended; the next begins."""
        self._turns.done(message.version)
        if isinstance(message, Evaluated):
            self._newest = max(self._newest, message.version)
        self._stream.tell(message)
        self._begin_next()

    @property
    def under_way(self) -> bool:
        """A version is being evaluated or waits for it."""
        return self._turns.are_left

    def _evaluate(self, version: int) -> None:
        skipped = self._turns.ask(version)
        if skipped is not None:
            self._backend.release(skipped)
            self._stream.emit(EvaluationSkipped, version=skipped)
        self._begin_next()

    def _begin_next(self) -> None:
        version = self._turns.start()
        if version is not None:
            self._backend.evaluate(version)
