"""The parameter server: the newest complete weights of a run in host memory, for whoever pulls.

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

from staleflow.errors import ConfigError
from staleflow.registry import load_named
from staleflow.servers.transport import Handle, Transport

TRANSPORTS = {
    "shared_memory": "staleflow.servers.shared_memory.SharedMemoryTransport",
    "memory": "staleflow.servers.memory.MemoryTransport",
}
"""Transports by name; a dotted path to a class with the same constructor works as well."""


class ParameterServer:
    """Storage of one run's weights, from construction to `close`. A context manager.

    `options` go to the transport, e.g. `directory` to `shared_memory`.
    """

    def __init__(
        self,
        transport: str = "shared_memory",
        *,
        run_name: str = "run",
        expected_bytes: int | None = None,
        **options: Any,
    ) -> None:
        """`expected_bytes`: (pullers + 2) times the model's bytes, or None to let the first push find out.

        Raises ConfigError when the transport is unknown, refuses an option, or lacks room.
        """
        create = load_named("transport", transport, TRANSPORTS)
        try:
            self._transport: Transport = create(run_name=run_name, expected_bytes=expected_bytes, **options)
        except TypeError as error:
            raise ConfigError(f"transport {transport!r} refuses its options {options}: {error}") from error

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
