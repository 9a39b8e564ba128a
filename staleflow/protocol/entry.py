"""Entries of the staleness buffer, and the batches it hands out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class BufferState(StrEnum):
    """What the next buffer waits for."""

    READY = "ready"
    """Consume is legal."""
    WAITING = "waiting"
    """Consume is illegal; a group of the newest version still fits."""
    STUCK = "stuck"
    """Consume is illegal and nothing fits: a reserved entry must be occupied or released first."""


class Entry(NamedTuple):
    """One group in the buffer at this moment. A named tuple, because consume creates a batch of them."""

    group: str
    version: int
    """V: the oldest weight version on which any of its members started."""
    occupied: bool
    spare: bool
    deadline: int
    """V + bound: the last buffer that may train on it."""
    order: int
    """Position among all reservations of this buffer object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """The batch of one training step."""

    buffer: int
    """V_buf: the training step."""
    entries: tuple[Entry, ...]
    """By deadline, then reservation order."""
    expired: tuple[str, ...]
    """Spare groups dropped because their deadline is past."""


class Live:
    """The mutable form of an entry, internal to the buffer and never handed out."""

    __slots__ = ("group", "occupied", "order", "spare", "version")

    def __init__(self, group: str, version: int, spare: bool, order: int) -> None:
        self.group = group
        self.version = version
        self.spare = spare
        self.order = order
        self.occupied = False

    def entry(self, bound: int) -> Entry:
        """An immutable copy of its present state."""
        version = self.version
        return Entry(self.group, version, self.occupied, self.spare, version + bound, self.order)
