"""The run folder: the only place where a run writes, held by one process at a time.

Invariants:

- an earlier run is never overwritten: a name in use is refused unless the run is resumed or its folder is
  cleaned, and only recognisable run folders are cleaned;
- while a RunFolder is open no other process can open the same folder (a file lock, which the kernel releases
  when the process ends);
- a run is resumed only with a config that agrees with the old one in everything that ids, order and weights
  depend on.
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
"""Lock file; its presence also marks a folder as a run folder."""

MUST_AGREE = ("run.seed", "staleness", "data", "redundancy.groups", "model", "coordination.policy")
"""Keys and sections that a resumed run must not change. The ledger states the policy's bound and the number
of spares only once, at its start."""
MAY_DIFFER = ("data.epochs", "data.max_filtered_batches")
"""Exceptions: they only decide how long the run continues."""


class RunFolder:
    """`<output_dir>/<name>/` and the paths in it. Use `create`; `close` releases the lock."""

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
        """Create, resume or clean the folder of a run, and lock it.

        `name` None: built from `now` (seconds since the epoch, UTC) and the seed. Raises RunFolderError, and
        changes nothing, if the name is invalid or in use, there is no run to resume, another process has the
        folder, or it cannot be written.
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
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """The append-only record of every protocol transition."""
        return self.path / "ledger.jsonl"

    @property
    def journal(self) -> Path:
        """The events of each trajectory with their times; absent with `telemetry.journal: false`."""
        return self.path / "journal.jsonl"

    @property
    def simulation(self) -> Path:
        """The machines of a simulated run; absent for a real run."""
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
        """Text file with the run's id at Weights & Biases, for resumed runs."""
        return self.path / "wandb_run_id"

    def write_config(self, text: str, about: Mapping[str, str]) -> None:
        """Write config.yaml atomically: `about` (versions, git state) as comments, then `text`."""
        header = "".join(f"# {key}: {value}\n" for key, value in about.items())
        temporary = self.config.with_suffix(".tmp")
        temporary.write_text(header + text, encoding="utf-8")
        temporary.replace(self.config)

    def close(self) -> None:
        """Release the lock; may be called twice."""
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
    """The folder of a future run, after all checks that are possible without creating it.

    `name` None: the name is built later, and the result is `output_dir`. Raises RunFolderError.
    """
    if resume and clean:
        raise RunFolderError("--resume and --clean exclude each other: one keeps the old run, one removes it")
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
            "--resume to continue it or --clean to remove it first"
        )
    if in_use and clean and not is_run_folder(path):
        raise RunFolderError(
            f"{path} is not a run folder, so --clean does not remove it: choose another run.name"
        )
    _check_writable(path)
    if (path / LOCK_NAME).is_file():
        os.close(_lock(path))
    return path


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume the run in `path` with a config (plain mapping) that differs in MUST_AGREE.

    Raises RunFolderError with the differing keys and their old and new values.
    """
    differing = config_differences(path / CONFIG_NAME, config, only_in=MUST_AGREE, except_in=MAY_DIFFER)
    if differing:
        raise RunFolderError(
            f"the run in {path} cannot be resumed with another {', '.join(differing)}: use the old "
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

    Compares only keys that both have. `only_in` and `except_in`: keys or sections. Empty without a file: the
    attempt died before it wrote anything that depends on a config.
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
    """Whether `path` is recognisable as a run folder."""
    return (path / LOCK_NAME).is_file() or all((path / n).is_file() for n in (CONFIG_NAME, "ledger.jsonl"))


def _holds_something(path: Path) -> bool:
    """Whether a run has written there; a refused start leaves only a lock and empty folders."""
    if not path.is_dir():
        return False
    others = [entry for entry in path.iterdir() if entry.name != LOCK_NAME]
    return any(not entry.is_dir() or any(entry.iterdir()) for entry in others)


def checked_path(output_dir: Path, name: str) -> Path:
    """The folder of the run called `name`. Raises RunFolderError if the name is invalid."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".") for part in parts) or "\0" in name or "\\" in name:
        raise RunFolderError(
            f"the run name {name!r} does not name a folder inside {output_dir}: use letters, digits, "
            '"-", "_" and "=", with "/" between parts'
        )
    path = output_dir / name
    for parent in [output_dir.joinpath(*parts[:n]) for n in range(1, len(parts))]:
        if is_run_folder(parent):
            raise RunFolderError(f"the run name {name!r} lies inside the folder of another run, {parent}")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RunFolderError(f"{path} exists and is not a folder: choose another run.name")
    return path


def _check_writable(path: Path) -> None:
    """Raise RunFolderError unless a folder can be created at `path`, or written if it exists."""
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
    """Create the folder and take its lock; returns the file descriptor that holds the lock."""
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
    """Remove everything but the lock, which stays held."""
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
