"""Kills a process group at once, including its shared memory."""

from __future__ import annotations

import contextlib
import os

import psutil


def kill_group(group: int) -> None:
    """SIGKILL every process of `group` except the caller.

    Python's resource trackers are spared: each exits by itself when the processes it serves are dead, and
    removes their shared memory, which would otherwise remain.
    """
    for _ in range(2):  # a process may have started another one during the first pass
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if process.pid != os.getpid() and os.getpgid(process.pid) == group and not _tracks(process):
                    process.kill()


def _tracks(process: psutil.Process) -> bool:
    return any("resource_tracker" in argument for argument in process.cmdline())
