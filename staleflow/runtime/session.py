"""A run as the command that started it sees it: rows, a status, a way to stop, an end.

`ThreadSession` is a loop in a thread of this process; `RaySession` a loop in an actor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from staleflow.telemetry.monitor import RunMonitor
from staleflow.telemetry.rows import Row, RunStatus


class Session(Protocol):
    """One attempt under way."""

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Rows since the last call, and the newest status (None: there is none yet)."""
        ...

    def request_stop(self) -> None:
        """Finish the step in training, save, and end."""
        ...

    def outcome(self) -> str | None:
        """The finish reason; None while the run goes on. Raises what ended the run, if it failed."""
        ...

    def close(self) -> None:
        """End everything at once, whatever state it is in. May be called twice."""
        ...


class ThreadSession:
    """A loop in a thread of this process."""

    def __init__(self, monitor: RunMonitor, loop: Callable[[], str], stop: Callable[[], None]) -> None:
        """`loop` returns the finish reason; `stop` asks it to finish its step and end."""
        self._monitor = monitor
        self._loop = loop
        self._stop = stop
        self._reason: str | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="run-loop", daemon=True)
        self._thread.start()

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Wait a moment, then take what there is."""
        self._thread.join(timeout_s)
        return self._monitor.take_rows(), self._monitor.status

    def request_stop(self) -> None:
        """Passed on to the loop."""
        self._stop()

    def outcome(self) -> str | None:
        """See `Session`."""
        if self._failure is not None:
            raise self._failure
        return self._reason

    def close(self) -> None:
        """The thread is a daemon and ends with the process; there is no other process."""

    def _run(self) -> None:
        try:
            self._reason = self._loop()
        except BaseException as error:
            self._failure = error
