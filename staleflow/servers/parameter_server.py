"""The parameter server: the newest complete weights of a run in host memory, for every process that pulls.

Invariants (kept by the transports, see `transport`): a puller never sees a torn version, a push never waits
for a puller, a lease dies with its process, and the newest version only grows.

::

    trainer -- Publisher.push(v) --> [segment] [segment] [segment] <-- Subscriber.lease() -- rollout instance
                                          ^ newest pointer         <-- Publisher.hold(v)  -- evaluation

The server itself owns the storage and nothing else: publisher and subscribers meet in the storage, in their
own processes, through the handle.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from staleflow.registry import make_named
from staleflow.servers.transport import Handle, Transport

TRANSPORTS = {
    "shared_memory": "staleflow.servers.shared_memory.SharedMemoryTransport",
    "memory": "staleflow.servers.memory.MemoryTransport",
}
"""Transports that need one owner process, by name; a dotted path to a class or function works as well. Those
between nodes are in `directory`."""
TRANSPORT_METHODS = ("close",)


class ParameterServer:
    """Storage of one run's weights, from construction to `close`. A context manager.

    `options` go to the transport, e.g. `directory` to `shared_memory`.
    """

    def __init__(self, transport: str = "shared_memory", *, run_name: str = "run", **options: Any) -> None:
        """Raises ConfigError when the transport is unknown or cannot be made with these options."""
        self._transport: Transport = make_named(
            "cluster.transport", transport, TRANSPORTS, {"run_name": run_name, **options}, TRANSPORT_METHODS
        )

    @property
    def handle(self) -> Handle:
        """What other processes connect with; small and, unless the transport is `memory`, picklable."""
        return self._transport.handle

    def close(self) -> None:
        """Remove the storage. May be called twice."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
