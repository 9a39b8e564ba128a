"""The transport of one node: weights in files of a shared-memory folder, mapped by every process.

Invariants:

- the newest pointer names a segment whose payload is whole; it is replaced atomically (rename), after the
  payload is complete, and its segment is never written again before a newer one has been published;
- a segment is written only under its exclusive lock, read only under a shared one, and neither is ever
  waited for: a writer that gets no segment allocates one, a reader that loses a race reads the pointer again;
- so there are at most (leases held at once) + 2 segments: the leased ones, the newest and the one written;
- a folder whose owner process is dead belongs to nobody: the next run that starts here removes it.

::

    <directory>/staleflow-ps-<run>-<random>/
        owner        exclusively locked while the run lives
        publisher    exclusively locked while a publisher lives: there is one
        newest       {"version", "segment", "sequence"}
        segment-<n>  see `segment`

Segments are reused and never given back before the end: fresh pages cost more than the copy itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.errors import ConfigError, TransportError
from staleflow.servers.file_lock import FileLock, try_lock
from staleflow.servers.segment import Layout, Segment, allocate
from staleflow.servers.transport import ScopedLease, Tensors

_FOLDER_PREFIX = "staleflow-ps-"
_LEASE_ATTEMPTS = 1000
"""A reader loses a race only when a whole push fits between two system calls; this many losses are a bug."""
_SWEEP_TIMEOUT_S = 10.0
"""Starting runs take the directory's lock for milliseconds each."""


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """The folder of one run; picklable."""

    folder: str

    def publisher(self) -> SharedMemoryPublisher:
        """See `transport.Handle`."""
        return SharedMemoryPublisher(Path(self.folder))

    def subscriber(self) -> SharedMemorySubscriber:
        """See `transport.Handle`."""
        return SharedMemorySubscriber(Path(self.folder))


class SharedMemoryTransport:
    """Owns the folder of one run: sweeps those of dead runs, creates its own, removes it at the end."""

    def __init__(
        self, *, run_name: str = "run", expected_bytes: int | None = None, directory: str = "/dev/shm"
    ) -> None:
        """`expected_bytes` (None: unknown) of segments in all are looked for before anything starts.

        Raises ConfigError when `directory` cannot be used or has not that much room.
        """
        parent = Path(directory)
        try:
            with _starting_in(parent):
                sweep(parent)
                if expected_bytes is not None and (lack := lack_of_room(parent, expected_bytes)):
                    raise ConfigError(lack)
                name = re.sub(r"[^A-Za-z0-9_.-]", "_", run_name)
                self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{name}-", dir=parent))
                self._owner = try_lock(self._folder / "owner", exclusive=True, create=True)
        except OSError as error:
            raise ConfigError(
                f"weights cannot be kept in {directory}: {error.strerror or error}; choose a writable folder"
                " in memory, such as /dev/shm"
            ) from error

    @property
    def handle(self) -> SharedMemoryHandle:
        """See `transport.Transport`."""
        return SharedMemoryHandle(str(self._folder))

    def close(self) -> None:
        """Remove the folder; mappings of live processes stay usable until they drop them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._owner is not None:
            self._owner.release()


class SharedMemoryLease(ScopedLease):
    """A segment under a shared lock."""

    def __init__(self, segment: Segment, lock: FileLock, version: int) -> None:
        self.version = version
        self._tensors: Tensors | None = segment.views
        self._lock = lock

    @property
    def tensors(self) -> Tensors:
        """See `transport.Lease`."""
        if self._tensors is None:
            raise TransportError(f"the lease on weight version {self.version} was released")
        return self._tensors

    def release(self) -> None:
        """See `transport.Lease`."""
        self._tensors = None
        self._lock.release()


class SharedMemorySubscriber:
    """Reads segments; maps each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: dict[str, Segment] = {}

    def newest(self) -> int | None:
        """See `transport.Subscriber`."""
        pointer = _read_newest(self._folder)
        return None if pointer is None else pointer.version

    def lease(self, version: int | None = None) -> SharedMemoryLease:
        """See `transport.Subscriber`."""
        for _ in range(_LEASE_ATTEMPTS):
            pointer = _read_newest(self._folder)
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
        for name in _segment_names(self._folder):
            # The first look is unlocked: pinning segments of no interest would take them from the writer.
            if self._segment(name).version == version and (lease := self._pin(name, version)):
                return lease
        raise TransportError(f"weight version {version} is gone; newest is {newest}")

    def _pin(self, name: str, version: int) -> SharedMemoryLease | None:
        """The segment under a shared lock, or None when it does not hold `version` (any more)."""
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

    def _segment(self, name: str) -> Segment:
        if name not in self._segments:
            self._segments[name] = Segment(self._folder / name)
        return self._segments[name]


class SharedMemoryPublisher:
    """Writes segments. All its state is in the folder, so a restarted publisher goes on where one died."""

    def __init__(self, folder: Path) -> None:
        """Raises TransportError when the folder is gone or another publisher is alive."""
        self._folder = folder
        try:
            lock = try_lock(folder / "publisher", exclusive=True, create=True)
        except OSError as error:
            raise TransportError(f"the parameter server's folder {folder} is gone: {error}") from error
        if lock is None:
            raise TransportError(f"another publisher pushes to {folder}")
        self._lock = lock
        self._reader = SharedMemorySubscriber(folder)
        for unfinished in folder.glob("*.new"):
            unfinished.unlink()
        self._segments = {name: Segment(folder / name, writable=True) for name in _segment_names(folder)}
        self._layout = next((segment.layout for segment in self._segments.values()), None)

    def push(self, version: int, tensors: Tensors) -> None:
        """See `transport.Publisher`."""
        newest = _read_newest(self._folder)
        if newest is not None and version <= newest.version:
            raise TransportError(f"weight version {version} is not above the newest, {newest.version}")
        layout = Layout.of(tensors)
        if self._layout is not None and (difference := self._layout.difference(layout)):
            raise TransportError(f"weight version {version} does not fit the first push: {difference}")
        sequence = 0 if newest is None else newest.sequence + 1
        try:
            segment, lock = self._take_segment(layout, newest)
            # Unlocked before it is published, so that no reader that follows the pointer finds it locked;
            # nobody else writes, so it stays as it is.
            try:
                segment.write(version, sequence, tensors)
            finally:
                lock.release()
            _write_newest(self._folder, Newest(version=version, segment=segment.path.name, sequence=sequence))
        except OSError as error:
            raise TransportError(f"weight version {version} could not be pushed: {error}") from error

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

    def _take_segment(self, layout: Layout, newest: Newest | None) -> tuple[Segment, FileLock]:
        """A segment that nobody reads and that is not the newest, exclusively locked."""
        for name, segment in self._segments.items():
            if newest is None or name != newest.segment:
                lock = try_lock(segment.path, exclusive=True)
                if lock is not None:
                    return segment, lock
        if lack := lack_of_room(self._folder, layout.file_bytes):
            raise TransportError(lack)
        path = self._folder / f"segment-{len(self._segments)}"
        aside = path.with_suffix(".new")
        allocate(aside, layout)
        lock = try_lock(aside, exclusive=True)  # before it has its name, when no reader can look at it
        if lock is None:
            raise TransportError(f"{aside} is locked by another program")
        aside.rename(path)
        self._segments[path.name] = Segment(path, writable=True)
        self._layout = layout
        return self._segments[path.name], lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest pointer."""

    version: int
    segment: str
    sequence: int


def lack_of_room(directory: Path, needed: int) -> str:
    """A sentence for the user when `directory` has not `needed` bytes free, else empty."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if needed <= free:
        return ""
    return (
        f"weights need {needed} bytes in {directory}, which has {free} bytes free: make it larger"
        f" (in a container: docker run --shm-size={-(-needed // 2**20) + 64}m or more) or choose another"
        " folder"
    )


def sweep(directory: Path) -> list[Path]:
    """Remove the folders of dead runs and return them. The directory's lock must be held."""
    removed = []
    for folder in directory.glob(f"{_FOLDER_PREFIX}*"):
        try:
            lock = try_lock(folder / "owner", exclusive=True, create=True)
        except OSError:
            continue  # another user's, or gone meanwhile
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
            removed.append(folder)
    return removed


@contextmanager
def _starting_in(directory: Path) -> Iterator[None]:
    """The directory's own lock: a folder seen under it without a locked owner file is dead, not new."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    while (lock := try_lock(directory, exclusive=True)) is None:
        if time.monotonic() > deadline:
            raise TransportError(f"{directory} is locked by another program")
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()


def _segment_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("segment-*") if path.suffix != ".new")


def _read_newest(folder: Path) -> Newest | None:
    try:
        data: dict[str, Any] = json.loads((folder / "newest").read_bytes())
    except FileNotFoundError:
        if folder.is_dir():
            return None
        raise TransportError(f"the parameter server's folder {folder} is gone") from None
    return Newest(**data)


def _write_newest(folder: Path, newest: Newest) -> None:
    aside = folder / "newest.aside"
    aside.write_text(
        json.dumps({"version": newest.version, "segment": newest.segment, "sequence": newest.sequence})
    )
    aside.replace(folder / "newest")
