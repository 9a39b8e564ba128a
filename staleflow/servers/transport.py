"""What a weight transport is: the seam between the parameter server and how bytes travel.

Invariants every transport keeps:

- a lease shows one whole weight version, the same bytes until it is released, whatever is pushed meanwhile;
- a push never waits for a puller, and pullers never wait for each other;
- versions only grow; a push that fails leaves the newest version as it was;
- a lease ends with the process that holds it.

Tensors travel by name, shard by shard (here: one shard = one tensor), so that a transport across nodes may
move and store them one by one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from staleflow.errors import TransportError

_LOOK_EVERY_S = 0.05

Tensors = Mapping[str, NDArray[Any]]
"""Weights by parameter name. Types numpy lacks (bfloat16) travel as views of an integer type."""


class Lease(Protocol):
    """One weight version, pinned. A context manager: leaving it releases."""

    @property
    def version(self) -> int:
        """The weight version seen."""
        ...

    @property
    def tensors(self) -> Tensors:
        """Read-only views without a copy; they must not be read after `release`.

        Raises TransportError when the lease was released.
        """
        ...

    def release(self) -> None:
        """Unpin. May be called twice."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Publisher(Protocol):
    """The pushing side; one at a time in a run."""

    def push(self, version: int, tensors: Tensors) -> None:
        """Copy `tensors` and make them the newest version. They may be changed again on return.

        `tensors.items()` is gone through once, and no tensor is kept when the next one is asked for: they may
        be made one by one, as gathering a sharded model does.

        Raises TransportError when `version` is not above the newest, names, types or shapes differ from the
        first push, or there is no room; the newest version then stays what it was.
        """
        ...

    def hold(self, version: int | None = None) -> Lease:
        """Keep a version (None: the newest) alive until released, e.g. while evaluation pulls it."""
        ...

    def close(self) -> None:
        """Stop pushing. What was pushed stays. May be called twice."""
        ...


class Subscriber(Protocol):
    """The pulling side; any number, each in its own process."""

    def newest(self) -> int | None:
        """Newest whole version, None before the first push. Raises TransportError when the server is gone."""
        ...

    def lease(self, version: int | None = None) -> Lease:
        """Pin a version (None: the newest). Raises TransportError when there is none or it is gone."""
        ...

    def close(self) -> None:
        """Drop mappings; leases taken stay valid until released. May be called twice."""
        ...


class Handle(Protocol):
    """Where the weights are: a small value that other processes receive (pickled) and connect with."""

    def publisher(self) -> Publisher:
        """Connect to push. Raises TransportError when another publisher is alive."""
        ...

    def subscriber(self) -> Subscriber:
        """Connect to pull."""
        ...

    def here(self) -> Handle:
        """The part of it on this node, which child processes can be given as well."""
        ...


class Transport(Protocol):
    """The storage of one run. Its constructor takes `run_name` and its own options."""

    @property
    def handle(self) -> Handle:
        """How others connect."""
        ...

    def close(self) -> None:
        """Remove the storage. May be called twice."""
        ...


def wait_for_weights(subscriber: Subscriber, limit_s: float) -> None:
    """Wait for the first version, which may be on its way to this node.

    Raises TransportError when there is none after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while subscriber.newest() is None:
        if time.monotonic() > deadline:
            raise TransportError(f"no weights have come to this node in {limit_s:.0f} s")
        time.sleep(_LOOK_EVERY_S)


class ScopedLease:
    """The context manager part of a lease, shared by the transports."""

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
