"""The process that calls a verifier: `python -P -m staleflow.reward.worker`, started by `worker_process`.

Invariants:

- it dies with its parent and adopts orphaned descendants, so killing its process tree kills everything;
- it handles requests in order and answers each before it takes the next;
- only answers are written to the results pipe, whatever the verifier prints or forks.

On the requests pipe: 8 bytes of length, then a pickled list of (number, pickled ScoreRequest).
On the results pipe, JSON lines: ["ready"] or ["failed", message] once, then
["result", number, status, raw, seconds, message, worn]; worn means that the process must be replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from staleflow.reward.outcome import judge
from staleflow.reward.verifiers import Verifier, load_verifier

LENGTH = struct.Struct("<Q")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Serve until the requests pipe ends.

    Arguments: verifier, memory in MB (0: no limit), process id of the parent, requests fd, results fd.
    """
    verifier_name, memory_mb, parent, requests_fd, results_fd = arguments
    _bind_to_parent(int(parent))
    results = _Results(int(results_fd))
    try:
        verifier = load_verifier(verifier_name)
    except BaseException as error:  # includes sys.exit during the import
        results.write("failed", str(error) or type(error).__name__)
        return 1
    had_children = _has_live_children()
    _limit_memory(int(memory_mb))
    results.write("ready")
    with os.fdopen(int(requests_fd), "rb") as requests:
        for number, blob in _received(requests):
            outcome = judge(functools.partial(_score, verifier, blob))
            if outcome.status == "memory":
                _lift_memory_limit()  # so that the answer can be sent
            # Leftovers of a verifier (memory, processes) must not count against the next request.
            worn = outcome.status == "memory" or (not had_children and _has_live_children())
            results.write(
                "result", number, outcome.status, outcome.raw, outcome.seconds, outcome.message, worn
            )
            while worn:
                signal.pause()  # until killed: exiting would orphan processes that still run below it
    return 0


class _Results:
    """The results pipe, for this process only."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._owner = os.getpid()

    def write(self, *fields: object) -> None:
        if os.getpid() != self._owner:
            os._exit(0)  # a child that the verifier forked has returned to this code
        line = json.dumps(fields).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


def _received(requests: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while length := requests.read(LENGTH.size):
        yield from pickle.loads(requests.read(LENGTH.unpack(length)[0]))


def _score(verifier: Verifier, blob: bytes) -> object:
    return verifier(pickle.loads(blob))


def _bind_to_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the first call
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # if the machine runs out of memory, this process is killed first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_memory(megabytes: int) -> None:
    """Limit the address space to its size with the loaded verifier plus `megabytes`."""
    if megabytes:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _lift_memory_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _has_live_children() -> bool:
    """Whether child processes, adopted ones included, still run; reaps those that ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
