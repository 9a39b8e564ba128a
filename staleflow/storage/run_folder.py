"""The run folder: the one place where a run writes, held by one process at a time.

Invariants:

- nothing of an earlier run is overwritten: a name in use is refused unless the run is resumed or its
  folder is cleaned, and only a folder that is recognisably a run's is ever cleaned;
- while a RunFolder is open no other process can open the same folder (a file lock, which the kernel drops
  with the process);
- a run is resumed only with a config that agrees with the old one in everything that gives ids, order and
  weights their meaning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml

from staleflow.errors import RunFolderError

CONFIG_NAME = "config.yaml"
LOCK_NAME = ".staleflow.lock"
"""Lock file; its presence also marks a folder as a run's."""

MUST_AGREE = ("run.seed", "staleness", "data", "redundancy.groups", "model", "coordination.policy")
"""Keys and sections in which a resumed run must have its old values. The ledger says once, at its start, what
bound the policy keeps and how many spares there may be."""
MAY_DIFFER = ("data.epochs", "data.max_filtered_batches")
"""Exceptions: how long the run goes on."""


class RunFolder:
    """`<output_dir>/<name>/` and the paths in it. Use `create`; `close` gives the lock back."""

    def __init__(self, path: Path, name: str, lock: int) -> None:
        self.path = path
        self.name = name
        self._lock: int | None = lock

    @classmethod
    def create(
        cls,
        output_dir: Path,
        name: str | None,
        *,
        now: float,
        seed: int = 0,
        resume: bool = False,
        clean: bool = False,
    ) -> Self:
        """Make, resume or clean the folder of a run, and lock it.

        `name` null: made from `now` (seconds since the epoch, UTC) and the seed. Raises RunFolderError when
        the name is unfit or in use, there is nothing to resume, another process has the folder, or it cannot
        be written; then nothing was changed.
        """
        if name is None and not resume:
            name = f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-seed{seed}"
        path = check_run_folder(output_dir, name, resume=resume, clean=clean)
        name = path.relative_to(output_dir).as_posix()
        lock = _lock(path)
        if clean:
            _empty(path)
        folder = cls(path, name, lock)
        folder.logs.mkdir(exist_ok=True)
        folder.checkpoints.mkdir(exist_ok=True)
        return folder

    @property
    def config(self) -> Path:
        """The resolved config, with versions and git state as comments."""
        return self.path / CONFIG_NAME

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """The append-only record of every protocol transition."""
        return self.path / "ledger.jsonl"

    @property
    def journal(self) -> Path:
        """What happened to each trajectory and when; none with `telemetry.journal: false`."""
        return self.path / "journal.jsonl"

    @property
    def simulation(self) -> Path:
        """What a simulated run was reckoned with; a real run has none."""
        return self.path / "simulation.json"

    @property
    def trace(self) -> Path:
        """The journal as a trace for Perfetto."""
        return self.path / "trace.json"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step_<N>/` folders."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """The offline HTML report."""
        return self.path / "report.html"

    @property
    def wandb_id(self) -> Path:
        """Text file with the id of the run at Weights & Biases, so that a resumed run goes on in it."""
        return self.path / "wandb_run_id"

    def write_config(self, text: str, about: Mapping[str, str]) -> None:
        """Write config.yaml, whole or not at all: `about` (versions, git state) as comments, then `text`."""
        header = "".join(f"# {key}: {value}\n" for key, value in about.items())
        aside = self.config.with_suffix(".tmp")
        aside.write_text(header + text, encoding="utf-8")
        aside.replace(self.config)

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_run_folder(
    output_dir: Path, name: str | None, *, resume: bool = False, clean: bool = False
) -> Path:
    """The folder that a run will have, after every check that can be made without creating it.

    `name` None: a new name is made later, and the folder returned is `output_dir`. Raises RunFolderError.
    """
    if resume and clean:
        raise RunFolderError("resume and clean exclude each other: one keeps the old run, one removes it")
    if name is None:
        if resume:
            raise RunFolderError(_which_to_resume(output_dir))
        _check_writable(output_dir)
        return output_dir
    path = checked_path(output_dir, name)
    in_use = _holds_something(path)
    if resume and not is_run_folder(path):
        raise RunFolderError(f"there is no run to resume in {path}")
    if in_use and not (resume or clean):
        raise RunFolderError(
            f"the run name {name!r} is in use in {output_dir}: choose another run.name, or give "
            "--resume to go on with it or --clean to remove it first"
        )
    if in_use and clean and not is_run_folder(path):
        raise RunFolderError(f"{path} is not a run folder, so --clean leaves it alone: choose another name")
    _check_writable(path)
    if (path / LOCK_NAME).is_file():
        os.close(_lock(path))
    return path


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume the run in `path` with a config (plain mapping) that differs where it matters.

    Raises RunFolderError naming the keys with their old and new values.
    """
    differing = config_differences(path / CONFIG_NAME, config, only_in=MUST_AGREE, except_in=MAY_DIFFER)
    if differing:
        raise RunFolderError(
            f"the run in {path} cannot be resumed with another {', '.join(differing)}: give the old "
            "values, or start a run with another run.name"
        )


def config_differences(
    path: Path,
    config: Mapping[str, Any],
    *,
    only_in: tuple[str, ...] | None = None,
    except_in: tuple[str, ...] = (),
) -> list[str]:
    """`key (was 1, now 2)` for each key in which the config file at `path` differs from `config`.

    Only keys that both have count. `only_in` and `except_in`: keys or sections. Empty when there is no file:
    the attempt died before it wrote anything that depends on a config.
    """
    if not path.is_file():
        return []
    old = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        f"{key} (was {before!r}, now {after!r})"
        for key, before, after in _differences(old, config)
        if (only_in is None or _under(key, only_in)) and not _under(key, except_in)
    ]


def is_run_folder(path: Path) -> bool:
    """Whether `path` is recognisably the folder of a run."""
    return (path / LOCK_NAME).is_file() or all((path / n).is_file() for n in (CONFIG_NAME, "ledger.jsonl"))


def _holds_something(path: Path) -> bool:
    """Whether a run has written there; a start that was refused leaves a lock and empty folders only."""
    if not path.is_dir():
        return False
    others = [entry for entry in path.iterdir() if entry.name != LOCK_NAME]
    return any(not entry.is_dir() or any(entry.iterdir()) for entry in others)


def checked_path(output_dir: Path, name: str) -> Path:
    """The folder of the run called `name`. Raises RunFolderError when the name is unfit."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") for part in parts) or "\0" in name or "\\" in name:
        raise RunFolderError(
            f"the run name {name!r} does not name a folder inside {output_dir}: use letters, digits, "
            '"-", "_", "=" and "/" between them'
        )
    path = output_dir / name
    for parent in [output_dir.joinpath(*parts[:n]) for n in range(1, len(parts))]:
        if is_run_folder(parent):
            raise RunFolderError(f"the run name {name!r} lies inside the folder of another run, {parent}")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RunFolderError(f"{path} exists and is not a folder: choose another run.name")
    return path


def _check_writable(path: Path) -> None:
    """Raise RunFolderError unless a folder can be made at `path`, or written if it exists."""
    parent = path
    while not parent.exists():
        parent = parent.parent
    problem = None if parent.is_dir() else errno.ENOTDIR
    if problem is None and not os.access(parent, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise _unwritable(path, os.strerror(problem))


def _unwritable(path: Path, reason: str | None) -> RunFolderError:
    return RunFolderError(
        f"the run folder {path} cannot be written ({reason}): choose another run.output_dir"
    )


def _lock(path: Path) -> int:
    """Make the folder and take its lock; the lock is the file descriptor returned."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise RunFolderError(f"another process is running in {path}: wait for it, or stop it") from error
    return lock


def _empty(path: Path) -> None:
    """Remove everything but the lock, which stays held throughout."""
    for entry in path.iterdir():
        if entry.name == LOCK_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _which_to_resume(output_dir: Path) -> str:
    runs = [p for p in output_dir.iterdir() if is_run_folder(p)] if output_dir.is_dir() else []
    if not runs:
        return f"there is no run to resume in {output_dir}"
    newest = max(runs, key=lambda p: p.stat().st_mtime)
    return f"give the name of the run to resume; the newest in {output_dir} is run.name={newest.name}"


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(key path, old value, new value) of every leaf that both have and that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and not key.endswith(".options"):
        prefix = f"{key}." if key else ""
        return [d for k in old if k in new for d in _differences(old[k], new[k], f"{prefix}{k}")]
    return [] if old == new else [(key, old, new)]


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
