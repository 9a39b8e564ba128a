"""Rank 0's interface to the other ranks, wherever their processes run.

A peer calls methods of its `Rank` and returns futures. It has two lines, each of which runs one call at a
time: one for work, one for sending weights during that work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from staleflow.errors import RunFailed

KILL_WAIT_S = 5.0
"""A killed process ends in milliseconds; the margin is for a very busy machine."""


class RankDied(RunFailed):
    """The process of a rank ended unexpectedly."""


class Peer(Protocol):
    """One rank in its own process."""

    def ask(self, method: str, *arguments: Any, sending: bool = False) -> Future[Any]:
        """Call a method of its `Rank`. The future raises RankDied if the process ends before it answers.

        `sending`: on the line for sending weights.
        """
        ...

    def kill(self) -> None:
        """End the process immediately. May be called twice."""
        ...


Launch = Callable[[int], Peer]
"""Starts the process of a rank; returns at once."""


class ProcessPeer:
    """A child process, which ends when this process ends."""

    def __init__(self, rank: int) -> None:
        context = get_context("spawn")
        self._rank = rank
        (self._work, work), (self._send, send) = context.Pipe(), context.Pipe()
        self._process = context.Process(
            target=_serve, args=(rank, work, send), name=f"rank-{rank}", daemon=True
        )
        self._process.start()
        work.close()
        send.close()
        self._lines = {
            False: (self._work, ThreadPoolExecutor(1, f"rank-{rank}")),
            True: (self._send, ThreadPoolExecutor(1, f"rank-{rank}-sending")),
        }

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, method: str, *arguments: Any, sending: bool = False) -> Future[Any]:
        """See `Peer`."""
        connection, line = self._lines[sending]
        return line.submit(self._call, connection, method, arguments)

    def kill(self) -> None:
        """See `Peer`."""
        self._process.kill()
        self._process.join(KILL_WAIT_S)
        for connection, line in self._lines.values():
            line.shutdown(wait=True, cancel_futures=True)
            connection.close()

    def _call(self, connection: Connection, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            connection.send((method, arguments))
            answer, error = connection.recv()
        except (EOFError, OSError) as lost:
            raise RankDied(f"the process of training rank {self._rank} died") from lost
        if error is not None:
            raise error
        return answer


def _serve(rank: int, work: Connection, send: Connection) -> None:
    """The child's side. Ends when the parent ends, even during a call.

    It ignores Ctrl-C: the parent decides, and finishing the step needs every rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from staleflow.training.deepspeed.rank import Rank

    mine = Rank(rank)
    threading.Thread(target=_answer, args=(mine, send), name="sending", daemon=True).start()
    _answer(mine, work)


def _answer(rank: Any, connection: Connection) -> None:
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        try:
            answer: Any = (getattr(rank, method)(*arguments), None)
        except Exception as error:
            answer = (
                None,
                error if isinstance(error, RunFailed) else RunFailed(f"{type(error).__name__}: {error}"),
            )
        try:
            connection.send(answer)
        except OSError:
            os._exit(1)
