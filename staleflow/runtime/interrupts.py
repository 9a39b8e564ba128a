"""Ctrl-C and SIGTERM as a number that the watching loop looks at, instead of an exception."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Counts Ctrl-C and SIGTERM while it is entered; the third one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 2:
            raise KeyboardInterrupt
