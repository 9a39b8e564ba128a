"""A weight version goes from one node's store to another's: piece by piece, at the receiver's own pace.

Invariants:

- the receiver asks, the sender answers: a sender waits for nobody, so a receiver that is slow or dead
  costs the others and the pushes nothing but one pinned segment;
- all pieces of a transfer are of one version, which the sender pins for as long as its ticket is good;
- a version becomes the newest of a node only when it is there as a whole; a transfer that breaks leaves the
  node as it was, and the next one starts anew with what is newest then;
- memory: a segment on either side, and the pieces under way, whose number the two sides limit.

::

    source node                                   other node
    [segment] <-- Sender.open, piece, done <----- Receiver --> [segment] --> newest pointer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.segment import SegmentLayout
from staleflow.servers.shared_memory_reader import SharedMemoryLease, SharedMemorySubscriber
from staleflow.servers.shared_memory_writer import SharedMemoryPublisher

TICKET_LIMIT_S = 120.0
"""A transfer of which nothing is heard for this long is over: its node is dead, or may as well be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a sender will send under a ticket."""

    ticket: str
    version: int
    manifest: bytes
    """Of the segment, see `segment.SegmentLayout`."""
    piece_bytes: int
    pieces: int


class RemoteSender(Protocol):
    """A `Sender` as a receiver reaches it. Everything raises TransportError when it does not get through."""

    def open(self, reader: str, version: int | None) -> Offer:
        """See `Sender`."""
        ...

    def pieces(self, offer: Offer) -> Iterator[NDArray[np.uint8]]:
        """The pieces in order; each is gone when the next is asked for."""
        ...

    def done(self, ticket: str) -> None:
        """See `Sender`; nothing is waited for."""
        ...


@dataclass(slots=True)
class _Ticket:
    lease: SharedMemoryLease
    heard_at: float


class Sender:
    """Pins a version for each reader and cuts it into pieces. One reader has one transfer at a time."""

    def __init__(
        self, subscriber: SharedMemorySubscriber, *, piece_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._subscriber = subscriber
        self._piece_bytes = piece_bytes
        self._clock = clock
        self._tickets: dict[str, _Ticket] = {}
        self._opened = 0

    @property
    def is_idle(self) -> bool:
        """No transfer is under way."""
        return not self._tickets

    def open(self, reader: str, version: int | None) -> Offer:
        """Begin a transfer of `version` (None: the newest); what the reader had open before is over.

        Raises TransportError when that version is not here.
        """
        now = self._clock()
        over = [
            ticket
            for ticket, held in self._tickets.items()
            if ticket.rpartition("/")[0] == reader or now - held.heard_at > TICKET_LIMIT_S
        ]
        for ticket in over:
            self.done(ticket)
        lease = self._subscriber.lease(version)
        self._opened += 1
        ticket = f"{reader}/{self._opened}"
        self._tickets[ticket] = _Ticket(lease, now)
        size = lease.payload.nbytes
        return Offer(
            ticket=ticket,
            version=lease.version,
            manifest=lease.layout.manifest,
            piece_bytes=self._piece_bytes,
            pieces=-(-size // self._piece_bytes),
        )

    def piece(self, ticket: str, index: int) -> tuple[int, NDArray[np.uint8]]:
        """Version and bytes of one piece. Raises TransportError when the ticket is no good any more."""
        held = self._tickets.get(ticket)
        if held is None:
            raise TransportError(f"the transfer {ticket} is over")
        held.heard_at = self._clock()
        start = index * self._piece_bytes
        return held.lease.version, held.lease.payload[start : start + self._piece_bytes]

    def done(self, ticket: str) -> None:
        """Let the version go. A ticket that is over already is no error."""
        held = self._tickets.pop(ticket, None)
        if held is not None:
            held.lease.release()


class Receiver:
    """Brings versions from a sender into the store of this node, whose only publisher it has."""

    def __init__(self, reader: str, sender: RemoteSender, store: SharedMemoryPublisher) -> None:
        """`reader` names this node to the sender."""
        self._reader = reader
        self._sender = sender
        self._store = store

    def bring_newest(self, known: int | None) -> int:
        """Have the sender's newest version here, if that is above `known`. Returns the newest one here.

        Raises TransportError when the transfer breaks; everything here is then as it was.
        """
        offer = self._sender.open(self._reader, None)
        try:
            if known is not None and offer.version <= known:
                return known
            self._store.receive(offer.version, SegmentLayout.from_manifest(offer.manifest), self._fill(offer))
            return offer.version
        finally:
            self._sender.done(offer.ticket)

    def bring_older(self, version: int) -> SharedMemoryLease:
        """Have a version that the sender still holds here too, until the lease is released.

        Raises TransportError as `bring_newest` does.
        """
        offer = self._sender.open(self._reader, version)
        try:
            layout = SegmentLayout.from_manifest(offer.manifest)
            return self._store.receive_older(offer.version, layout, self._fill(offer))
        finally:
            self._sender.done(offer.ticket)

    def _fill(self, offer: Offer) -> Callable[[NDArray[Any]], None]:
        def fill(payload: NDArray[Any]) -> None:
            end = 0
            for piece in self._sender.pieces(offer):
                payload[end : end + piece.nbytes] = piece
                end += piece.nbytes
            if end != payload.nbytes:
                raise TransportError(f"{end} of {payload.nbytes} bytes came")

        return fill
