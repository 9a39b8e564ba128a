"""The transport within one process, for the inline runtime: same interface, plain copies.

Invariant: a leased version consists of its own arrays, which no push changes; it is kept while it is the
newest or has a lease.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.segment import SegmentLayout
from staleflow.servers.transport import ScopedLease, Tensors


class MemoryTransport:
    """Storage, handle, publisher and subscriber in one: in one process they need no connection."""

    def __init__(self, *, run_name: str = "run") -> None:
        """`run_name`, which every transport is given, names nothing here."""
        self._versions: dict[int, Tensors] = {}
        self._leases: dict[int, int] = {}
        self._newest: int | None = None
        self._layout: SegmentLayout | None = None

    @property
    def handle(self) -> MemoryTransport:
        """See `transport.Transport`."""
        return self

    def publisher(self) -> MemoryTransport:
        """See `transport.Handle`."""
        return self

    def subscriber(self) -> MemoryTransport:
        """See `transport.Handle`."""
        return self

    def here(self) -> MemoryTransport:
        """See `transport.Handle`."""
        return self

    def push(self, version: int, tensors: Tensors) -> None:
        """See `transport.Publisher`."""
        if self._newest is not None and version <= self._newest:
            raise TransportError(f"weight version {version} is not above the newest, {self._newest}")
        copies = {name: _frozen_copy(tensor) for name, tensor in tensors.items()}
        layout = SegmentLayout.of(copies)
        if self._layout is not None and (difference := self._layout.difference(layout)):
            raise TransportError(f"weight version {version} does not match the first push: {difference}")
        self._layout = layout
        self._versions[version] = MappingProxyType(copies)
        self._newest = version
        self._drop_unused()

    def newest(self) -> int | None:
        """See `transport.Subscriber`."""
        return self._newest

    def lease(self, version: int | None = None) -> MemoryLease:
        """See `transport.Subscriber`."""
        if self._newest is None:
            raise TransportError("no weights were pushed yet")
        wanted = self._newest if version is None else version
        if wanted not in self._versions:
            state = "is gone" if wanted < self._newest else "was not pushed"
            raise TransportError(f"weight version {wanted} {state}; newest is {self._newest}")
        self._leases[wanted] = self._leases.get(wanted, 0) + 1
        return MemoryLease(self, wanted, self._versions[wanted])

    def hold(self, version: int | None = None) -> MemoryLease:
        """See `transport.Publisher`."""
        return self.lease(version)

    def close(self) -> None:
        """Does nothing: the storage ends with the process."""

    def released(self, version: int) -> None:
        """Note that a lease on `version` ended."""
        self._leases[version] -= 1
        self._drop_unused()

    def _drop_unused(self) -> None:
        self._leases = {version: count for version, count in self._leases.items() if count}
        kept = self._leases.keys() | {self._newest}
        self._versions = {version: t for version, t in self._versions.items() if version in kept}

    def __reduce__(self) -> NoReturn:
        raise TransportError("the memory transport works in one process only; use shared_memory")


class MemoryLease(ScopedLease):
    """A reference to one version."""

    def __init__(self, transport: MemoryTransport, version: int, tensors: Tensors) -> None:
        self.version = version
        self._transport = transport
        self._tensors: Tensors | None = tensors

    @property
    def tensors(self) -> Tensors:
        """See `transport.Lease`."""
        if self._tensors is None:
            raise TransportError(f"the lease on weight version {self.version} was released")
        return self._tensors

    def release(self) -> None:
        """See `transport.Lease`."""
        if self._tensors is not None:
            self._tensors = None
            self._transport.released(self.version)


def _frozen_copy(tensor: NDArray[Any]) -> NDArray[Any]:
    copy = np.array(tensor, order="C")
    copy.flags.writeable = False
    return copy
