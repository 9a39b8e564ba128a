"""The parent's side of one worker process: start, send, receive, kill.

Invariants:

- no call waits: the pipes are non-blocking, and a process descriptor reports the exit, since children of a
  verifier may keep the pipes open;
- the first of `assigned` is the request being scored. `deadline` (monotonic seconds, None: idle) is the time
  at which the worker is killed because of that request, or because it has not started;
- `kill` leaves no descendant: the worker leads its own session and adopts orphans.

Start workers from a thread that outlives them: the kernel's parent-death signal fires when the *thread* that
started them ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.reward.worker import LENGTH

_KILL_PASSES = 200
"""Each pass kills all descendants found; more passes are needed only if some start new ones meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One submitted request."""

    number: int
    """Unique in the pool: trajectory ids may be submitted twice."""
    trajectory_id: str
    blob: bytes
    """Pickled ScoreRequest."""


class WorkerProcess:
    """One running worker."""

    def __init__(self, verifier: str, memory_mb: int, *, start_timeout_s: float, log: Path | None) -> None:
        """`memory_mb` 0: unlimited. `log`: file to append its output to; None drops it."""
        requests_end, self.requests = os.pipe()
        self.results, results_end = os.pipe()
        arguments = (verifier, memory_mb, os.getpid(), requests_end, results_end)
        try:
            with open(log or os.devnull, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "staleflow.reward.worker", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(requests_end, results_end),
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _search_path()},
                )
        finally:
            os.close(requests_end)
            os.close(results_end)
        self.exit = os.pidfd_open(self._process.pid)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.results, False)
        self.ready = False
        """True if the verifier is loaded."""
        self.start_error = ""
        """Error message if loading the verifier failed, else empty."""
        self.worn = False
        """The worker has reported that it must be replaced."""
        self.assigned: deque[Item] = deque()
        self.deadline: float | None = time.monotonic() + start_timeout_s
        self._unsent = bytearray()
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id; also the id of its group and session."""
        return self._process.pid

    @property
    def wants_to_send(self) -> bool:
        """Whether `send_rest` has data left for when the pipe accepts more."""
        return bool(self._unsent)

    def assign(self, items: Sequence[Item]) -> None:
        """Send requests to an idle worker."""
        self.assigned.extend(items)
        message = pickle.dumps([(item.number, item.blob) for item in items])
        self._unsent += LENGTH.pack(len(message)) + message
        self.send_rest()

    def send_rest(self) -> None:
        """Write as much as the pipe accepts now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests, self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the worker ended; its process descriptor reports that
            self._unsent.clear()

    def receive(self) -> list[list[Any]]:
        """The answers received so far. Lines that are not JSON lists are not the worker's and are skipped."""
        chunks = [self._unread]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.results, 1 << 16):
                chunks.append(chunk)
        *lines, self._unread = b"".join(chunks).split(b"\n")
        answers = []
        for line in lines:
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, list) and answer:
                    answers.append(answer)
        return answers

    def has_exited(self) -> bool:
        """Whether the process ended. Does not reap it, so that its group id is not reused."""
        return os.waitid(os.P_PIDFD, self.exit, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> str:
        """Kill the worker and all processes below it, close its pipes, and return how it ended."""
        _kill_tree(self.pid)
        code = self._process.wait()
        for descriptor in (self.requests, self.results, self.exit):
            os.close(descriptor)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _search_path() -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _kill_tree(root: int) -> None:
    # Stop the worker first: then it starts no more children but still adopts the orphans of those killed, so
    # all descendants can be found below it until none is left.
    _signal_group(root, signal.SIGSTOP)
    killed: set[int] = set()
    for _ in range(_KILL_PASSES):
        found = _descendants(root) - killed
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    _signal_group(root, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state parent ...", where the name may contain any character
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.update(below)
        frontier.extend(below)
    return found
