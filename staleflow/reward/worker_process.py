"""The parent's side of one worker process: start, send, receive, kill.

Invariants:

- nothing here waits: the pipes do not block, and the exit is seen through a process descriptor, since
  children of a verifier may keep the pipes open;
- the first of `assigned` is the request being scored, and `deadline` (monotonic seconds, None: idle) the
  moment at which the worker is to be killed for it, or for not having started;
- `kill` leaves no descendant: the worker leads its own session and adopts orphans.

Start workers from a thread that lives as long as they should: the kernel's parent-death signal fires when the
*thread* that started them ends.
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
"""Each pass kills all descendants seen; more are needed only while some escape by making new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One submitted request on its way."""

    number: int
    """Unique in the pool: trajectory ids may be submitted twice."""
    trajectory_id: str
    blob: bytes
    """Pickled ScoreRequest."""


class WorkerProcess:
    """One running worker."""

    def __init__(self, verifier: str, memory_mb: int, *, start_timeout_s: float, log: Path | None) -> None:
        """`memory_mb` 0: no limit. `log`: where its output is appended; None: nowhere."""
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
        """The verifier is loaded."""
        self.start_error = ""
        """What loading it said, if it failed."""
        self.worn = False
        """Said of itself that it must be replaced."""
        self.assigned: deque[Item] = deque()
        self.deadline: float | None = time.monotonic() + start_timeout_s
        self._unsent = bytearray()
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id, also of its group and session."""
        return self._process.pid

    @property
    def wants_to_send(self) -> bool:
        """Whether `send_rest` has something to do once the pipe takes more."""
        return bool(self._unsent)

    def assign(self, items: Sequence[Item]) -> None:
        """Send requests to an idle worker."""
        self.assigned.extend(items)
        message = pickle.dumps([(item.number, item.blob) for item in items])
        self._unsent += LENGTH.pack(len(message)) + message
        self.send_rest()

    def send_rest(self) -> None:
        """Write what the pipe takes now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests, self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended, which its process descriptor tells
            self._unsent.clear()

    def receive(self) -> list[list[Any]]:
        """The answers that have come. Lines that are no JSON lists are not the worker's and are skipped."""
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
        """Whether the process ended, without reaping it, so that its group stays its own."""
        return os.waitid(os.P_PIDFD, self.exit, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> str:
        """Kill the worker and every process below it, close all, and say how it had ended."""
        _kill_tree(self.pid)
        code = self._process.wait()
        for descriptor in (self.requests, self.results, self.exit):
            os.close(descriptor)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _search_path() -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _kill_tree(root: int) -> None:
    # Stopped first: a stopped worker makes no more children but still adopts the orphans of those killed,
    # which keeps everything findable below it until nothing new is found.
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
            # "pid (name) state parent ...", where the name may hold anything
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.update(below)
        frontier.extend(below)
    return found
