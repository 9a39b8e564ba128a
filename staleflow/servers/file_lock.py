"""Advisory locks on files that end with the process that holds them.

Invariants:

- the lock belongs to one open file description of one process: its descriptor is closed on exec and, by a
  fork hook, in forked children, so no child can keep a dead process's lock;
- the kernel releases it when the process ends in any way, SIGKILL included;
- acquiring a lock never waits.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An acquired lock; see `try_lock`."""

    def __init__(self, descriptor: int) -> None:
        # Release by closing: LOCK_UN in a forked child would also release the parent's lock.
        self._close = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        self._close()


def try_lock(path: Path, *, exclusive: bool, create: bool = False) -> FileLock | None:
    """Lock the file or folder at `path`, or return None if it is held in a conflicting mode.

    `create`: create an empty file if it is missing. Raises OSError if it cannot be opened.
    """
    flags = (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return FileLock(descriptor)


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
