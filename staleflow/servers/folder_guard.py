"""Removes a folder when the process that made it ends, in any way, SIGKILL included.

Invariant: the guard is a separate process that waits for the end of a pipe whose other end only the owner
holds; the kernel closes it when the owner ends. The guard is neither a child of the owner nor in its session,
so Ctrl-C and a clean-up of the owner's children do not end it. It is a shell that takes one megabyte.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# The outer shell ends at once, the inner one stays. It reads descriptor 3, since its stdin is /dev/null.
_GUARD = 'exec 3<&0; ( read -r _ <&3; rm -rf -- "$0" ) >/dev/null 2>&1 &'


class FolderGuard:
    """Guards `folder` from construction until this process ends or calls `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the shell cannot be started."""
        read_end, self._pipe = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _GUARD, str(folder)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(read_end)
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Remove the folder now, in the background. May be called twice."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
