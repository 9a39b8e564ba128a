"""Ending a process group at once, and with it what it keeps in shared memory."""

from __future__ import annotations

import contextlib
import os

import psutil


def kill_group(group: int) -> None:
    """SIGKILL every process of `group` but the caller.

    Python's resource trackers are spared: each ends by itself when those that it serves are dead, and removes
    their shared memory, which would stay behind otherwise.
    """
    for _ in range(2):  # one that was about to start another may have done so
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if process.pid != os.getpid() and os.getpgid(process.pid) == group and not _tracks(process):
                    process.kill()


def _tracks(process: psutil.Process) -> bool:
    return any("resource_tracker" in argument for argument in process.cmdline())
