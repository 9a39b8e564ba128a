"""Removes a folder when the process that made it ends, in whatever way, SIGKILL included.

Invariant: the guard is a process of its own that waits for the end of a pipe whose other end only the owner
holds; the kernel closes it when the owner ends. The guard is no child of the owner, nor in its session, so
neither Ctrl-C nor whoever cleans up the owner's children takes it along. It is a shell with one megabyte.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# The inner shell outlives the outer one, which ends at once. Without the detour by 3 it would read /dev/null.
_GUARD = 'exec 3<&0; ( read -r _ <&3; rm -rf -- "$0" ) >/dev/null 2>&1 &'


class FolderGuard:
    """Guards `folder` from construction to the end of this process, or to `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError when there is no shell."""
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
        """Let go: the folder is removed now, in the background. May be called twice."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
