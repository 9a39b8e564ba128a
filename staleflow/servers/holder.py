"""The weights on one node: a store in shared memory, and an actor that keeps it at the newest version.

Invariants:

- processes of a node read only its store, so each version reaches a node once, however many instances run
  there;
- the node where the trainer pushes is the source of all others; its holder only sends;
- a failed transfer is retried, after a pause, as long as a newer version exists; meanwhile the store keeps
  the old version;
- between nodes, pieces travel as Ray objects, by its object store or a direct transport. The sender's store
  keeps at most `KEPT_PIECES` of them, and at most `AHEAD` are on their way to each receiver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from staleflow.errors import TransportError
from staleflow.servers.direct import DIRECT, as_array, put_piece
from staleflow.servers.replication import Offer, Receiver, Sender
from staleflow.servers.shared_memory import SharedMemoryHandle, SharedMemoryTransport
from staleflow.servers.shared_memory_reader import SharedMemoryLease

KEPT_PIECES = 4
"""Pieces that the sender keeps for receivers that ask for them slightly later."""
AHEAD = 2
"""Pieces that a receiver requests ahead: it copies one while the next is on its way."""
ANSWER_LIMIT_S = 60.0
"""A sender that does not answer within this time is unreachable; a piece takes a fraction of a second."""
LEAST_REST_S, MOST_REST_S = 0.5, 10.0
"""Bounds on the pause between two attempts; it doubles with each failure."""

HOLDER_GROUPS = {"serve": 1, "life": 1, "tell": 1, "older": 1}
"""Threads of a holder, by concurrency group."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderUp:
    """A holder has started."""

    handle: SharedMemoryHandle
    direct: bool
    """Whether its process can use the direct transport."""


class WeightHolder:
    """See the module. A Ray actor with `HOLDER_GROUPS`."""

    def start(
        self,
        *,
        node: str,
        run_name: str,
        directory: str | None,
        piece_bytes: int,
        probe_direct: bool,
        log_as: Callable[[str], None] | None = None,
    ) -> HolderUp:
        """Create the store. Raises ConfigError if its folder cannot be used."""
        if log_as is not None:
            log_as(f"weights-{node[:8]}")
        options: dict[str, Any] = {} if directory is None else {"directory": directory}
        self._node = node
        self._transport = SharedMemoryTransport(run_name=f"{run_name}-{node[:8]}", guarded=True, **options)
        self._handle = self._transport.handle
        self._subscriber = self._handle.subscriber()
        self._sender = Sender(self._handle.subscriber(), piece_bytes=piece_bytes, clock=time.monotonic)
        self._sent: OrderedDict[tuple[int, int, bool], Any] = OrderedDict()
        self._news = threading.Condition()
        self._announced: int = -1
        self._closed = False
        self._storing = threading.Lock()
        self._receiver: Receiver | None = None
        self._older: dict[int, SharedMemoryLease] = {}
        return HolderUp(handle=self._handle, direct=probe_direct and DIRECT.works())

    def follow(self, source: Any, direct: bool) -> None:
        """From now on, keep the store at the newest version of the holder `source`."""
        if self._receiver is not None:
            return
        self._receiver = Receiver(self._node, RaySender(source, direct), self._handle.publisher())
        threading.Thread(target=self._keep_up, name="follow", daemon=True).start()

    @ray.method(concurrency_group="tell")
    def tell(self, version: int) -> None:
        """Announce that the source has `version`."""
        with self._news:
            self._announced = max(self._announced, version)
            self._news.notify()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Liveness check."""

    def close(self) -> None:
        """Remove the store."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._transport.close()

    # ------------------------------------------------------------------ sending

    @ray.method(concurrency_group="serve")
    def open(self, reader: str, version: int | None) -> Offer:
        """See `replication.Sender`."""
        return self._sender.open(reader, version)

    @ray.method(concurrency_group="serve")
    def piece(self, ticket: str, index: int, direct: bool) -> list[Any]:
        """A reference to a piece, in a list, so that Ray does not resolve it."""
        version, piece = self._sender.piece(ticket, index)
        key = (version, index, direct)
        if key not in self._sent:
            while len(self._sent) >= KEPT_PIECES:
                self._sent.popitem(last=False)
            self._sent[key] = put_piece(piece, direct=direct)
        return [self._sent[key]]

    @ray.method(concurrency_group="serve")
    def done(self, ticket: str) -> None:
        """See `replication.Sender`."""
        self._sender.done(ticket)
        if self._sender.is_idle:
            self._sent.clear()

    # ------------------------------------------------------------------ receiving

    @ray.method(concurrency_group="older")
    def bring(self, version: int) -> None:
        """Fetch a version that the source still has and keep it until `let_go`, beside any newer one.

        Raises TransportError if the transfer breaks or the source no longer has that version.
        """
        if self._receiver is None:
            raise TransportError(
                f"weight version {version} is not on this node, and the node has no source to fetch it from"
            )
        with self._storing:
            newest = self._subscriber.newest()
            if newest is None or newest < version:
                newest = self._receiver.bring_newest(newest)
            if newest == version:
                self._older[version] = self._subscriber.lease(version)
            else:
                self._older[version] = self._receiver.bring_older(version)

    @ray.method(concurrency_group="older")
    def let_go(self, version: int) -> None:
        """Release a version kept by `bring`: the caller has its own lease, or does not need it."""
        lease = self._older.pop(version, None)
        if lease is not None:
            lease.release()

    def _keep_up(self) -> None:
        assert self._receiver is not None
        rest_s = LEAST_REST_S
        known = -1  # the first transfer waits for no announcement: the source may already have weights
        while True:
            with self._news:
                while not self._closed and known >= self._announced and known >= 0:
                    self._news.wait()
                if self._closed:
                    return
            try:
                with self._storing:
                    known = self._receiver.bring_newest(self._subscriber.newest())
                rest_s = LEAST_REST_S
            except Exception as error:  # catch all: without this thread the node would stay behind
                _log.warning("weights did not reach node %s: %r", self._node, error)
                with self._news:
                    self._news.wait(rest_s)
                rest_s = min(2 * rest_s, MOST_REST_S)


class RaySender:
    """The holder of another node as a `replication.RemoteSender`."""

    def __init__(self, holder: Any, direct: bool) -> None:
        self._holder = holder
        self._direct = direct

    def open(self, reader: str, version: int | None) -> Offer:
        """See `RemoteSender`."""
        offer: Offer = self._get(self._holder.open.remote(reader, version))
        return offer

    def pieces(self, offer: Offer) -> Iterator[NDArray[np.uint8]]:
        """See `RemoteSender`."""
        asked: deque[Any] = deque()
        for index in range(offer.pieces + AHEAD):
            if index < offer.pieces:
                asked.append(self._holder.piece.remote(offer.ticket, index, self._direct))
            if index >= AHEAD:
                (reference,) = self._get(asked.popleft())
                yield as_array(self._get(reference))

    def done(self, ticket: str) -> None:
        """See `RemoteSender`."""
        self._holder.done.remote(ticket)

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=ANSWER_LIMIT_S)
        except RayTaskError as error:
            if isinstance(error.cause, TransportError):
                raise error.cause from None
            raise TransportError(f"the sender failed: {error.cause!r}") from error
        except RayError as error:
            raise TransportError(
                f"the sender has died or cannot be reached: {type(error).__name__}"
            ) from error
