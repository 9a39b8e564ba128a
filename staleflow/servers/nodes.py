"""Publisher and subscribers of a parameter server on several nodes.

Every process uses the store in the shared memory of its own node (`holder`), which it finds through the
directory. `NodeHandle.here` is that store alone: it works without a connection to Ray, so it can be passed to
child processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from staleflow.errors import StaleflowError, TransportError
from staleflow.servers.shared_memory import SharedMemoryHandle
from staleflow.servers.shared_memory_reader import SharedMemoryLease, SharedMemorySubscriber
from staleflow.servers.transport import Tensors

FIND_LIMIT_S = 150.0
"""For the first process of a node, which waits until the holder is up."""
FIND_AGAIN_LIMIT_S = 15.0
"""For an instance whose holder has died: it does not decode while it waits for a new one."""
BRING_LIMIT_S = 600.0
"""For a version that evaluation fetches from another node; a whole model may take long."""


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """Handle of the directory of the stores; picklable within Ray."""

    directory: Any
    """Handle of the actor `WeightDirectory`."""

    def publisher(self) -> NodePublisher:
        """See `transport.Handle`. This node becomes the source of all others."""
        return NodePublisher(self.directory)

    def subscriber(self) -> NodeSubscriber:
        """See `transport.Handle`. It connects on first use."""
        return NodeSubscriber(self.directory)

    def here(self) -> SharedMemoryHandle:
        """See `transport.Handle`."""
        return _store_here(self.directory)[0]


class NodePublisher:
    """Pushes into this node's store; the other nodes fetch it from there."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._local = _store_here(directory, source=True)[0].publisher()

    def push(self, version: int, tensors: Tensors) -> None:
        """See `transport.Publisher`. The version reaches other nodes somewhat later."""
        self._local.push(version, tensors)
        self._directory.pushed.remote(version)

    def hold(self, version: int | None = None) -> SharedMemoryLease:
        """See `transport.Publisher`. A held version can be leased on every node."""
        return self._local.hold(version)

    def close(self) -> None:
        """See `transport.Publisher`."""
        self._local.close()


class NodeSubscriber:
    """Reads this node's store, and finds the new one if its holder has died."""

    def __init__(self, directory: Any) -> None:
        self._directory = directory
        self._local: SharedMemorySubscriber | None = None
        self._holder: Any = None
        self._limit_s = FIND_LIMIT_S

    def newest(self) -> int | None:
        """See `transport.Subscriber`: the newest version that is complete on this node."""
        try:
            return self._connected().newest()
        except TransportError:
            self._forget()
            raise

    def lease(self, version: int | None = None) -> SharedMemoryLease:
        """See `transport.Subscriber`. Fetches a version that the publisher holds and this node lacks."""
        try:
            newest = self.newest()
        except TransportError:
            newest = self.newest()  # of the holder that has replaced a dead one
        local = self._connected()
        if version is None or newest == version:
            return local.lease(version)
        try:
            return local.lease(version)
        except TransportError:
            return self._fetched(version, local)

    def close(self) -> None:
        """See `transport.Subscriber`."""
        self._forget()

    def _fetched(self, version: int, local: SharedMemorySubscriber) -> SharedMemoryLease:
        holder = self._holder
        try:
            _ask(holder.bring.remote(version), BRING_LIMIT_S)
            return local.lease(version)
        finally:  # also after a timeout, for a version that arrives later
            holder.let_go.remote(version)

    def _connected(self) -> SharedMemorySubscriber:
        if self._local is None:
            handle, self._holder = _store_here(self._directory, limit_s=self._limit_s)
            self._local = handle.subscriber()
            self._limit_s = FIND_AGAIN_LIMIT_S
        return self._local

    def _forget(self) -> None:
        if self._local is not None:
            self._local.close()
        self._local = self._holder = None


def _store_here(
    directory: Any, *, source: bool = False, limit_s: float = FIND_LIMIT_S
) -> tuple[SharedMemoryHandle, Any]:
    node = ray.get_runtime_context().get_node_id()
    found: tuple[SharedMemoryHandle, Any] = _ask(directory.store.remote(node, source=source), limit_s)
    return found


def _ask(reference: Any, limit_s: float) -> Any:
    try:
        return ray.get(reference, timeout=limit_s)
    except RayTaskError as error:
        if isinstance(error.cause, StaleflowError):
            raise error.cause from None
        raise TransportError(f"the parameter server failed: {error.cause!r}") from error
    except RayError as error:
        raise TransportError(f"the parameter server does not answer: {type(error).__name__}") from error
