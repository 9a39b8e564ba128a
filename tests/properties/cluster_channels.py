"""Channels between the parts of a random cluster: messages take their time, and none overtakes another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from staleflow.simulation.event_queue import EventQueue


class Channels:
    """Channels by name; a message takes up to `delay` seconds."""

    def __init__(self, clock: EventQueue, rng: random.Random, delay: float) -> None:
        self._clock, self._rng, self._delay = clock, rng, delay
        self._last: dict[str, float] = {}

    def send(self, channel: str, at: float, arrive: Callable[..., None], *arguments: Any) -> None:
        """A message leaves at `at`; `arrive` is called when it is there."""
        arrival = max(self._last.get(channel, 0.0), at + self._rng.random() * self._delay)
        self._last[channel] = arrival
        self._clock.schedule(arrival, arrive, *arguments)
