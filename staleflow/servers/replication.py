"""Copies a weight version from one node's store to another's: piece by piece, at the receiver's pace.

Invariants:

- the receiver asks, the sender answers: a sender never waits, so a receiver that is slow or dead costs other
  receivers and pushes only one pinned segment;
- all pieces of a transfer belong to one version, which the sender pins as long as the ticket is valid;
- a version becomes the newest of a node only when it is complete; a transfer that breaks leaves the node
  unchanged, and the next one starts again with the newest version at that time;
- memory: one segment on either side, and the pieces on their way, whose number both sides limit.

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
"""A transfer without a request for this long is over: its node is presumed dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Description of the data that a sender will send under a ticket."""

    ticket: str
    version: int
    manifest: bytes
    """Manifest of the segment, see `segment.SegmentLayout`."""
    piece_bytes: int
    pieces: int


class RemoteSender(Protocol):
    """A receiver's access to a `Sender`. Every call raises TransportError if the sender cannot be reached."""

    def open(self, reader: str, version: int | None) -> Offer:
        """See `Sender`."""
        ...

    def pieces(self, offer: Offer) -> Iterator[NDArray[np.uint8]]:
        """The pieces in order; each is valid until the next is requested."""
        ...

    def done(self, ticket: str) -> None:
        """See `Sender`; does not wait."""
        ...


@dataclass(slots=True)
class _Ticket:
    lease: SharedMemoryLease
    heard_at: float


class Sender:
    """Pins a version for each reader and cuts it into pieces. Each reader has one transfer at a time."""

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
        """True if no transfer is under way."""
        return not self._tickets

    def open(self, reader: str, version: int | None) -> Offer:
        """Begin a transfer of `version` (None: the newest) and end the reader's earlier transfer.

        Raises TransportError if that version is not in the store.
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
        """Version and bytes of one piece. Raises TransportError if the ticket is no longer valid."""
        held = self._tickets.get(ticket)
        if held is None:
            raise TransportError(f"the transfer {ticket} is over")
        held.heard_at = self._clock()
        start = index * self._piece_bytes
        return held.lease.version, held.lease.payload[start : start + self._piece_bytes]

    def done(self, ticket: str) -> None:
        """Release the version. Does nothing for a ticket that is already over."""
        held = self._tickets.pop(ticket, None)
        if held is not None:
            held.lease.release()


class Receiver:
    """Copies versions from a sender into the store of this node, as its only publisher."""

    def __init__(self, reader: str, sender: RemoteSender, store: SharedMemoryPublisher) -> None:
        """`reader` identifies this node to the sender."""
        self._reader = reader
        self._sender = sender
        self._store = store

    def bring_newest(self, known: int | None) -> int:
        """Fetch the sender's newest version if it is above `known`. Returns the newest version of this node.

        Raises TransportError if the transfer breaks; the store is then unchanged.
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
        """Fetch a version that the sender still holds, and keep it until the lease is released.

        Raises TransportError like `bring_newest`.
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
                raise TransportError(f"only {end} of {payload.nbytes} bytes arrived")

        return fill
