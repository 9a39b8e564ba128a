"""Atomic checkpoints: whole or absent.

Invariants, also under `kill -9` or a power cut at any moment:

- a folder named `step_N` is complete: files are written under another name, every file and folder is fsynced,
  then the manifest with the size and hash of each file is written, then the folder is renamed;
- `newest_whole` does not rely on names: it checks sizes and hashes and skips damaged checkpoints;
- an old checkpoint is removed only after the new one is whole.

One process writes into a root at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST = "manifest.json"
UNFINISHED = ".writing-"
STEP_NAME = re.compile(r"step_(\d+)")


def write_checkpoint(root: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Write `root/step_<step>` with `write(folder)`, then keep the newest `keep` whole ones, this included.

    If the step has a whole checkpoint already, returns it without calling `write`. Raises ValueError for
    `keep` < 1, and any error of `write` or the file system; existing checkpoints are then unchanged.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    target = root / f"step_{step}"
    if is_whole(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    for unfinished in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished)
    if target.exists():
        shutil.rmtree(target)  # damaged, so nothing is lost
    temporary = root / f"{UNFINISHED}step_{step}"
    temporary.mkdir()
    try:
        write(temporary)
        _seal(temporary, step)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _fsync(root)
    _prune(root, keep, newest=step)
    return target


def newest_whole(root: Path) -> tuple[int, Path] | None:
    """The whole checkpoint with the highest step, as (step, folder); None if there is none."""
    for step, folder in _by_step(root):
        if is_whole(folder):
            return step, folder
    return None


def is_whole(folder: Path, *, contents: bool = True) -> bool:
    """Whether the manifest exists and every file matches its size and, with `contents`, its hash."""
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        for name, entry in listed.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return False
            if contents and _digest(path) != entry["blake2b"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _seal(folder: Path, step: int) -> None:
    """Make the folder's content durable and list it in the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {}
    for path in files:
        _fsync(path)
        listed[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _digest(path)}
    for path in folder.rglob("*"):
        if path.is_dir():
            _fsync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": listed}, indent=1))
    _fsync(manifest)
    _fsync(folder)


def _prune(root: Path, keep: int, newest: int) -> None:
    """Remove checkpoints older than the newest `keep`; damaged ones do not count as kept.

    Checks only sizes: hashing every old checkpoint at every save would be too slow.
    """
    kept = 0
    for step, folder in _by_step(root):
        if step > newest:
            continue
        if kept < keep:
            kept += is_whole(folder, contents=False)
        else:
            shutil.rmtree(folder)


def _by_step(root: Path) -> Iterator[tuple[int, Path]]:
    """Folders with a checkpoint's name, newest first."""
    named = [(match, path) for path in root.glob("step_*") if (match := STEP_NAME.fullmatch(path.name))]
    yield from sorted(((int(match[1]), path) for match, path in named), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
