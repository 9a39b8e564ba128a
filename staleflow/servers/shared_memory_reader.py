"""The pulling side of `shared_memory`: pins segments and gives access to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.file_lock import FileLock, try_lock
from staleflow.servers.segment import SegmentLayout, WeightSegment
from staleflow.servers.store_files import read_newest, segment_names
from staleflow.servers.transport import ScopedLease, Tensors

_LEASE_ATTEMPTS = 1000
"""A reader loses a race only if a whole push fits between two system calls; this many losses are a bug."""


class SharedMemoryLease(ScopedLease):
    """A segment under a shared lock."""

    def __init__(self, segment: WeightSegment, lock: FileLock, version: int) -> None:
        self.version = version
        # Keep references to the views: the segment drops its own when the subscriber closes.
        self._shown: tuple[Tensors, NDArray[np.uint8], SegmentLayout] | None
        self._shown = segment.views, segment.payload, segment.layout
        self._lock = lock

    @property
    def tensors(self) -> Tensors:
        """See `transport.Lease`."""
        return self._open_views()[0]

    @property
    def payload(self) -> NDArray[np.uint8]:
        """All tensors as raw bytes of the segment."""
        return self._open_views()[1]

    @property
    def layout(self) -> SegmentLayout:
        """Layout of the payload."""
        return self._open_views()[2]

    def release(self) -> None:
        """See `transport.Lease`."""
        self._shown = None
        self._lock.release()

    def _open_views(self) -> tuple[Tensors, NDArray[np.uint8], SegmentLayout]:
        if self._shown is None:
            raise TransportError(f"the lease on weight version {self.version} was released")
        return self._shown


class SharedMemorySubscriber:
    """Reads segments; maps each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: dict[str, WeightSegment] = {}

    def newest(self) -> int | None:
        """See `transport.Subscriber`."""
        pointer = read_newest(self._folder)
        return None if pointer is None else pointer.version

    def lease(self, version: int | None = None) -> SharedMemoryLease:
        """See `transport.Subscriber`."""
        for _ in range(_LEASE_ATTEMPTS):
            pointer = read_newest(self._folder)
            if pointer is None:
                raise TransportError("no weights were pushed yet")
            if version is None or version == pointer.version:
                lease = self._pin(pointer.segment, pointer.version)
                if lease is not None:
                    return lease
            elif version > pointer.version:
                raise TransportError(f"weight version {version} was not pushed; newest is {pointer.version}")
            else:
                return self._lease_older(version, pointer.version)
        raise TransportError(f"no segment in {self._folder} could be read")

    def close(self) -> None:
        """See `transport.Subscriber`."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def _lease_older(self, version: int, newest: int) -> SharedMemoryLease:
        for name in segment_names(self._folder):
            # The first check is unlocked: pinning other segments would take them from the writer.
            if self._segment(name).version == version and (lease := self._pin(name, version)):
                return lease
        raise TransportError(f"weight version {version} is gone; newest is {newest}")

    def _pin(self, name: str, version: int) -> SharedMemoryLease | None:
        """The segment under a shared lock, or None if it does not hold `version` (any more)."""
        try:
            lock = try_lock(self._folder / name, exclusive=False)
            segment = self._segment(name)
        except OSError as error:
            raise TransportError(f"{self._folder / name} cannot be read: {error}") from error
        if lock is None:
            return None
        if segment.version != version:
            lock.release()
            return None
        return SharedMemoryLease(segment, lock, version)

    def _segment(self, name: str) -> WeightSegment:
        if name not in self._segments:
            self._segments[name] = WeightSegment(self._folder / name)
        return self._segments[name]
