"""The pushing side of `shared_memory`: finds or makes a segment without readers, fills it, publishes it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.file_lock import FileLock, try_lock
from staleflow.servers.segment import Draft, SegmentLayout, WeightSegment
from staleflow.servers.shared_memory_reader import SharedMemoryLease, SharedMemorySubscriber
from staleflow.servers.store_files import Newest, lack_of_room, read_newest, segment_names, write_newest
from staleflow.servers.transport import Tensors


class SharedMemoryPublisher:
    """Writes segments. All its state is in the folder, so a new publisher continues where another died."""

    def __init__(self, folder: Path) -> None:
        """Raises TransportError if the folder is gone or another publisher is alive."""
        self._folder = folder
        try:
            lock = try_lock(folder / "publisher", exclusive=True, create=True)
        except OSError as error:
            raise TransportError(f"the parameter server's folder {folder} is gone: {error}") from error
        if lock is None:
            raise TransportError(f"another publisher already pushes to {folder}")
        self._lock = lock
        self._reader = SharedMemorySubscriber(folder)
        for unfinished in folder.glob("*.new"):
            unfinished.unlink()
        self._segments = {name: WeightSegment(folder / name, writable=True) for name in segment_names(folder)}
        self._layout = next((segment.layout for segment in self._segments.values()), None)

    def push(self, version: int, tensors: Tensors) -> None:
        """See `transport.Publisher`."""
        newest = self._newest_below(version)
        if self._layout is None:
            segment, lock = self._first_segment(version, tensors)
            self._publish(version, segment, lock, newest, lambda _: None)
        else:
            segment, lock = self._take_segment(version, self._layout, newest)
            self._publish(version, segment, lock, newest, lambda s: s.write(tensors))

    def receive(self, version: int, layout: SegmentLayout, fill: Callable[[NDArray[np.uint8]], None]) -> None:
        """A push whose payload `fill` writes; an exception in `fill` ends the push.

        Raises TransportError like `push`.
        """
        newest = self._newest_below(version)
        segment, lock = self._take_segment(version, self._like_first(version, layout), newest)
        self._publish(version, segment, lock, newest, lambda s: fill(s.payload))

    def receive_older(
        self, version: int, layout: SegmentLayout, fill: Callable[[NDArray[np.uint8]], None]
    ) -> SharedMemoryLease:
        """Like `receive`, for a version below the newest; it is kept until the lease is released."""
        newest = read_newest(self._folder)
        if newest is None:
            raise TransportError(f"weight version {version} is not older than the newest: none was pushed")
        segment, lock = self._take_segment(version, self._like_first(version, layout), newest)
        self._write(version, segment, lock, newest.sequence, lambda s: fill(s.payload))
        return self._reader.lease(version)  # this is the only writer, so the version is still there

    def hold(self, version: int | None = None) -> SharedMemoryLease:
        """See `transport.Publisher`."""
        return self._reader.lease(version)

    def close(self) -> None:
        """See `transport.Publisher`."""
        self._reader.close()
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
        self._lock.release()

    def _newest_below(self, version: int) -> Newest | None:
        newest = read_newest(self._folder)
        if newest is not None and version <= newest.version:
            raise TransportError(f"weight version {version} is not above the newest, {newest.version}")
        return newest

    def _like_first(self, version: int, layout: SegmentLayout) -> SegmentLayout:
        if self._layout is None:
            return layout
        if difference := self._layout.difference(layout):
            raise TransportError(f"weight version {version} does not match the first push: {difference}")
        return self._layout

    def _publish(
        self,
        version: int,
        segment: WeightSegment,
        lock: FileLock,
        newest: Newest | None,
        fill: Callable[[WeightSegment], None],
    ) -> None:
        sequence = 0 if newest is None else newest.sequence + 1
        self._write(version, segment, lock, sequence, fill)
        with _as_failed_push(version):
            write_newest(self._folder, Newest(version=version, segment=segment.path.name, sequence=sequence))

    def _write(
        self,
        version: int,
        segment: WeightSegment,
        lock: FileLock,
        sequence: int,
        fill: Callable[[WeightSegment], None],
    ) -> None:
        # Unlock before publishing, so that no reader following the pointer finds it locked. This is the only
        # writer, so the segment does not change.
        try:
            segment.begin(sequence)
            fill(segment)
            segment.commit(version)
        except TransportError as error:
            raise TransportError(f"weight version {version} could not be pushed: {error}") from error
        finally:
            lock.release()

    def _take_segment(
        self, version: int, layout: SegmentLayout, newest: Newest | None
    ) -> tuple[WeightSegment, FileLock]:
        """A segment without readers that is not the newest, exclusively locked."""
        with _as_failed_push(version):
            for name, segment in self._segments.items():
                if newest is None or name != newest.segment:
                    lock = try_lock(segment.path, exclusive=True)
                    if lock is not None:
                        return segment, lock
            if lack := lack_of_room(self._folder, layout.file_bytes):
                raise TransportError(lack)
            return self._make_segment(lambda draft: draft.reserve(layout))

    def _first_segment(self, version: int, tensors: Tensors) -> tuple[WeightSegment, FileLock]:
        """Make the segment of the first push, which also determines the layout."""

        def write(draft: Draft) -> None:
            for name, tensor in tensors.items():
                draft.append(name, tensor)

        with _as_failed_push(version):
            return self._make_segment(write)

    def _make_segment(self, write: Callable[[Draft], None]) -> tuple[WeightSegment, FileLock]:
        path = self._folder / f"segment-{len(self._segments)}"
        draft = Draft(path.with_suffix(".new"))
        try:
            write(draft)
            draft.finish()
            lock = try_lock(draft.path, exclusive=True)  # before it has its final name, so without contention
            if lock is None:
                raise TransportError(f"{draft.path} is locked by another program")
            draft.path.rename(path)
        except BaseException as error:
            lack = lack_of_room(self._folder, draft.layout.file_bytes)
            draft.path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC and lack:
                raise TransportError(lack) from error
            raise
        finally:
            draft.close()
        self._segments[path.name] = WeightSegment(path, writable=True)
        self._layout = draft.layout
        return self._segments[path.name], lock


@contextmanager
def _as_failed_push(version: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"weight version {version} could not be pushed: {error}") from error
