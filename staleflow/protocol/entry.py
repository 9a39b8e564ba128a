"""What the staleness buffer holds and hands out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class BufferState(StrEnum):
    """What the next buffer waits for."""

    READY = "ready"
    """Consume is legal."""
    WAITING = "waiting"
    """Consume is not legal; a group of the newest version still fits."""
    STUCK = "stuck"
    """Consume is not legal and nothing fits: a reserved entry must be occupied or released first."""


class Entry(NamedTuple):
    """One group in the buffer, as it is now. A named tuple, because consume makes a whole batch of them."""

    group: str
    version: int
    """V: the oldest weight version any of its members was started on."""
    occupied: bool
    spare: bool
    deadline: int
    """V + bound: the last buffer in which it may be trained on."""
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
    """An entry inside the buffer: the one mutable form, never handed out."""

    __slots__ = ("group", "occupied", "order", "spare", "version")

    def __init__(self, group: str, version: int, spare: bool, order: int) -> None:
        self.group = group
        self.version = version
        self.spare = spare
        self.order = order
        self.occupied = False

    def entry(self, bound: int) -> Entry:
        """Its present state, to hand out."""
        version = self.version
        return Entry(self.group, version, self.occupied, self.spare, version + bound, self.order)
