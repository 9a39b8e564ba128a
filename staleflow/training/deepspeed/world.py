"""Rank 0 and its peers as one: a call runs on all ranks and ends on all ranks.

Invariants:

- a call returns when every rank is done. It raises RunFailed as soon as one cannot finish: its process died,
  it raised, or a collective took longer than its time limit. The call's work is then lost: all peers are
  killed, and the world can only be closed. An error that every rank raises on purpose breaks nothing;
- a thread inside a collective cannot be stopped, so rank 0 works in its own thread and the caller waits;
- after `close` no process of a rank exists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as LimitReached
from typing import Any, TypeVar

from staleflow.errors import RunFailed, StaleflowError
from staleflow.training.deepspeed.peers import Launch, Peer, RankDied
from staleflow.training.deepspeed.process_group import Meeting, choose_backend, leave, open_meeting
from staleflow.training.deepspeed.rank import Rank

T = TypeVar("T")

SETTLE_S = 3.0
"""Wait after a failure: other ranks fail as a consequence, and the first cause is chosen among all errors."""


class World:
    """See the module. `rank` is rank 0, in this process."""

    def __init__(
        self,
        *,
        ranks: int,
        launch: Launch,
        backend: str = "auto",
        host: str = "127.0.0.1",
        start_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """Start the peers' processes and meet them. `host`: address of this process for the peers.

        Raises RunFailed if they have not met within `start_timeout_s`.
        """
        self.ranks = ranks
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._broken = False
        self._peers: list[Peer] = []
        self._own = ThreadPoolExecutor(1, "rank-0")
        self.rank = Rank(0)
        try:
            store = open_meeting(host, ranks, start_timeout_s)
            meeting = Meeting(
                host=host,
                port=store.port,
                ranks=ranks,
                backend=choose_backend(backend),
                start_timeout_s=start_timeout_s,
                timeout_s=timeout_s,
            )
            self._peers = [launch(rank) for rank in range(1, ranks)]
            self.run("join", meeting, own=lambda: self.rank.join(meeting, store), limit_s=start_timeout_s)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        method: str,
        *arguments: Any,
        own: Callable[[], Any] | None = None,
        limit_s: float | None = None,
    ) -> list[Any]:
        """Call a method of `Rank` on all ranks; returns their answers by rank.

        `own`: called on rank 0 instead. `limit_s`: for the whole call; None: only collectives are limited.
        Raises RunFailed, or rank 0's error if it is one for the user.
        """
        if self._broken:
            raise RunFailed("the training ranks were stopped after an earlier failure")
        answers: list[Future[Any]] = [
            self._own.submit(own) if own else self._own.submit(getattr(self.rank, method), *arguments)
        ]
        answers += [peer.ask(method, *arguments) for peer in self._peers]
        if not self._all_done(answers, limit_s):
            raise self._give_up(method, answers, None if _errors(answers) else limit_s)
        return [a.result() for a in answers]

    def _all_done(self, answers: Sequence[Future[Any]], limit_s: float | None) -> bool:
        """Wait for all; False as soon as one fails or the time is up.

        Once rank 0 is done the others do not need it any more, so they may take no longer than a collective.
        """
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        rank_0, left = answers[0], set(answers)
        while left:
            over_s = deadline - time.monotonic()
            done, left = wait(
                left, timeout=None if over_s == math.inf else max(0.0, over_s), return_when=FIRST_COMPLETED
            )
            if not done or any(a.exception() is not None for a in done):
                return False
            if rank_0 in done:
                deadline = min(deadline, time.monotonic() + self._timeout_s)
        return True

    def send(self, method: str, *arguments: Any, own: Iterable[T]) -> Iterator[T]:
        """Yield from `own` on rank 0 while the peers call `method` on their line for sending.

        Raises RunFailed, with the first cause, if a rank fails.
        """
        answers: list[Future[Any]] = [peer.ask(method, *arguments, sending=True) for peer in self._peers]
        try:
            yield from own
            for answer in answers:
                answer.result()
        except Exception as error:
            rank_0: Future[Any] = Future()
            rank_0.set_exception(error)
            raise self._give_up(method, [rank_0, *answers], None) from error

    def close(self) -> None:
        """End all peers and leave. May be called twice."""
        self._broken = True
        for peer in self._peers:
            peer.kill()
        self._peers = []
        self._own.shutdown(wait=False, cancel_futures=True)
        leave()

    def _give_up(self, method: str, answers: Sequence[Future[Any]], limit_s: float | None) -> Exception:
        """Find the first cause among the ranks' errors; kill the peers."""
        began = time.monotonic()
        while time.monotonic() - began < SETTLE_S and not _deaths(answers):
            if all(a.done() for a in answers):
                break
            time.sleep(0.05)
        deaths, errors = _deaths(answers), _errors(answers)
        if not deaths and len(errors) == len(answers) and isinstance(errors[0], StaleflowError):
            return errors[0]  # all of them refused: nothing is broken
        self._broken = True
        silent = [rank for rank, a in enumerate(answers) if not a.done()]
        for peer in self._peers:
            peer.kill()
        if deaths:
            return RunFailed(
                f"the process of training {_names(deaths)} died at `{method}`; see the logs folder"
            )
        if limit_s is not None:
            return RunFailed(
                f"training {_names(silent)} did not finish `{method}` within the time limit of {limit_s:g} s"
            )
        if 0 in errors and isinstance(errors[0], StaleflowError):
            return errors[0]
        where = f"; {_names(silent)} did not answer" if silent else ""
        rank, error = next(iter(errors.items()), (0, LimitReached()))
        if not errors:
            return RunFailed(
                f"training {_names(silent)} did not finish `{method}` within {self._timeout_s:g} s of rank 0"
            )
        text = str(error) or type(error).__name__
        return RunFailed(f"training rank {rank} failed at `{method}`: {text.splitlines()[0]}{where}")


def _errors(answers: Sequence[Future[Any]]) -> dict[int, BaseException]:
    found = {rank: a.exception() for rank, a in enumerate(answers) if a.done() and not a.cancelled()}
    return {rank: error for rank, error in found.items() if error is not None}


def _deaths(answers: Sequence[Future[Any]]) -> list[int]:
    return [rank for rank, error in _errors(answers).items() if isinstance(error, RankDied)]


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
