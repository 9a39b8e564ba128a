"""Drives `Control`: one event after the other, and a coordination cycle when one is due.

A cycle follows news, at the earliest `interval_s` after the last one, or a quarter of that where something
stands still until it; and it comes at the time that `Control` asks to be woken at.

Invariant: an event that comes up while actions are performed waits for the rest of them, so that ledger
records are written in the order of their numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staleflow.coordination.actions import Action
from staleflow.coordination.control import Control
from staleflow.coordination.events import Event, Rewarded
from staleflow.runtime.clock import Clock
from staleflow.telemetry.events import ControlRan, EventStream

URGENT_SHARE = 0.25
"""Of the interval: where many instances run empty one after the other, they share a cycle."""


class ControlDriver:
    """The only caller of `Control.handle` and `Control.cycle`."""

    def __init__(
        self,
        control: Control,
        performers: Mapping[type, Callable[[Any], None]],
        *,
        stream: EventStream,
        clock: Clock,
        interval_s: float,
    ) -> None:
        """`performers` carry out actions, by their type."""
        self._control = control
        self._control_clock = control.view.clock
        self._performers = performers
        self._stream = stream
        self._clock = clock
        self._interval_s = interval_s
        self._handle = self._timed_handle if stream.has(ControlRan) else control.handle
        self._waiting: deque[Event] = deque()
        self._performing = False
        self._next_from = self._urgent_from = -math.inf
        """The earliest next cycle: for any news, and for urgent ones."""
        self.cycle_at = math.inf
        """When the next cycle is due; inf: not before something happens."""
        self.now = clock.now()
        """The time at which what is told has happened: set by the loop once a turn."""

    def tell(self, event: Event) -> None:
        """An event has happened."""
        if self._performing:
            self._waiting.append(event)
            return
        actions = self._handle(event)
        if actions:
            self.perform(actions)
        elif isinstance(event, Rewarded):
            return  # its group is not complete: there is nothing new to decide on
        self.want_cycle(self.now)

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, then handle the events that came up, one after the other."""
        performers, waiting = self._performers, self._waiting
        self._performing = True
        for action in actions:
            performers[type(action)](action)
        while waiting:
            for action in self._handle(waiting.popleft()):
                performers[type(action)](action)
            self.want_cycle(self.now)
        self._performing = False

    def cycle(self) -> None:
        """Let `Control` decide."""
        now = self.now = self._clock.now()
        self._next_from = now + self._interval_s
        self._urgent_from = now + self._interval_s * URGENT_SHARE
        self.cycle_at = math.inf
        began = self._clock.cpu()
        actions = self._control.cycle(now)
        self._stream.emit(ControlRan, self._clock.cpu() - began, True)
        self.perform(actions)
        wake_at = self._control_clock.wake_at
        if wake_at is not None:
            self.want_cycle(wake_at)

    def want_cycle(self, at: float) -> None:
        """A cycle is due at `at`, but not before the interval since the last one is over."""
        if at >= self.cycle_at:
            return
        earliest = self._urgent_from if self._control_clock.urgent else self._next_from
        if at < earliest:
            at = earliest
        if at < self.cycle_at:
            self.cycle_at = at

    def _timed_handle(self, event: Event) -> Sequence[Action]:
        began = self._clock.cpu()
        actions = self._control.handle(event)
        self._stream.emit(ControlRan, self._clock.cpu() - began, False)
        return actions
