"""The transport on one node: weights in files of a shared-memory folder, mapped by every process.

Invariants:

- the newest pointer names a segment whose payload is complete; it is replaced atomically (rename) after the
  payload is complete, and its segment is not written again before a newer one has been published;
- a segment is written only under its exclusive lock and read only under a shared one, without waiting for
  either: a writer without a free segment allocates one, a reader that loses a race reads the pointer again;
- so there are at most (leases held at once) + 2 segments: the leased ones, the newest and the one written;
- the next run that starts on this node removes folders whose owner process is dead.

::

    <directory>/staleflow-ps-<run>-<random>/
        owner        exclusively locked while the run lives
        publisher    exclusively locked while a publisher lives: there is one
        newest       {"version", "segment", "sequence"}
        segment-<n>  see `segment`

Segments are reused and never freed before the end: fresh pages cost more than the copy itself.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from staleflow.errors import ConfigError
from staleflow.servers.file_lock import try_lock
from staleflow.servers.folder_guard import FolderGuard
from staleflow.servers.shared_memory_reader import SharedMemorySubscriber
from staleflow.servers.shared_memory_writer import SharedMemoryPublisher
from staleflow.servers.store_files import FOLDER_PREFIX, starting_in, sweep


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

    def here(self) -> SharedMemoryHandle:
        """See `transport.Handle`."""
        return self


class SharedMemoryTransport:
    """Owns the folder of one run: removes those of dead runs, creates its own, removes it at the end."""

    def __init__(
        self,
        *,
        run_name: str = "run",
        directory: str = "/dev/shm",
        guarded: bool = False,
    ) -> None:
        """`guarded`: the folder is removed as soon as this process is killed, not only when the next run
        starts.

        Raises ConfigError if `directory` cannot be used.
        """
        parent = Path(directory)
        try:
            with starting_in(parent):
                sweep(parent)
                name = re.sub(r"[^A-Za-z0-9_.-]", "_", run_name)
                self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{name}-", dir=parent))
                self._owner = try_lock(self._folder / "owner", exclusive=True, create=True)
            self._guard = FolderGuard(self._folder) if guarded else None
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
        if self._guard is not None:
            self._guard.close()
        if self._owner is not None:
            self._owner.release()
