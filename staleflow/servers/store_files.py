"""A run's folder in shared memory, and its files other than segments.

Invariant: the newest pointer is replaced atomically, so a reader sees either the old or the new one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.errors import TransportError
from staleflow.servers.file_lock import try_lock

FOLDER_PREFIX = "staleflow-ps-"
_SWEEP_TIMEOUT_S = 10.0
"""Each starting run holds the directory's lock for only milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest pointer."""

    version: int
    segment: str
    sequence: int


def segment_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("segment-*") if path.suffix != ".new")


def read_newest(folder: Path) -> Newest | None:
    try:
        data: dict[str, Any] = json.loads((folder / "newest").read_bytes())
    except FileNotFoundError:
        if folder.is_dir():
            return None
        raise TransportError(f"the parameter server's folder {folder} is gone") from None
    return Newest(**data)


def write_newest(folder: Path, newest: Newest) -> None:
    aside = folder / "newest.aside"
    aside.write_text(
        json.dumps({"version": newest.version, "segment": newest.segment, "sequence": newest.sequence})
    )
    aside.replace(folder / "newest")


def lack_of_room(directory: Path, needed: int) -> str:
    """A sentence for the user if `directory` has fewer than `needed` bytes free, else empty."""
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
    for folder in directory.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = try_lock(folder / "owner", exclusive=True, create=True)
        except OSError:
            continue  # it belongs to another user, or was removed meanwhile
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
            removed.append(folder)
    return removed


@contextmanager
def starting_in(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: under it, a folder without a locked owner file is dead, not new."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT_S
    while (lock := try_lock(directory, exclusive=True)) is None:
        if time.monotonic() > deadline:
            raise TransportError(f"{directory} is locked by another program")
        time.sleep(0.01)
    try:
        yield
    finally:
        lock.release()
