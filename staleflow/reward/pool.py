"""Verifiers in worker processes with hard limits.

Invariants:

- every submitted request is answered exactly once, whatever its verifier does;
- a request is tried once: one that hangs, crashes or takes too much memory is scored by the policy and
  counted, and the others are unaffected;
- the limits need nobody's cooperation: time is enforced by SIGKILL to the worker and all its descendants,
  from a thread of the pool's own, and memory by the kernel;
- loading a verifier counts against `start_timeout_s`, never against a request's limit.

::

    submit -> queue -> supervisor's thread -- batches --> worker 0..n-1 (one process each)
                              |           <-- answers --
    poll <--- answers <-------+           --- SIGKILL at the limit, then a new worker

It guards against accidents and is no sandbox: the memory limit is per process, and a verifier that crashes
its worker after starting a process in a session of its own leaves that process behind.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from staleflow.data.trajectory import Reward
from staleflow.errors import ConfigError, RunFailed
from staleflow.reward.outcome import OnFailure, OutcomePolicy, RewardCounts, VerifierOutcome
from staleflow.reward.supervisor import Supervisor
from staleflow.reward.verifiers import ScoreRequest
from staleflow.reward.worker_process import Item, WorkerProcess


class RewardPool:
    """Scores trajectories; see the module. A context manager; methods may be called from any thread."""

    def __init__(
        self,
        verifier: str,
        *,
        workers: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        on_failure: OnFailure = "mask",
        start_timeout_s: float = 120.0,
        log: Path | None = None,
    ) -> None:
        """Start `workers` processes and wait until each has loaded `verifier` (a name or a dotted path).

        `timeout_s`: wall time of one request. `memory_mb`: what a worker may take above what the loaded
        verifier takes; 0 is no limit. `log`: file for what verifiers print; None drops it. Raises ConfigError
        when an argument or the verifier is no good.
        """
        if workers < 1:
            raise ConfigError(f"reward.workers is {workers}; it must be at least 1")
        if memory_mb < 0:
            raise ConfigError(f"reward.memory_mb is {memory_mb}; it must be at least 0 (0: no limit)")
        if not timeout_s > 0:
            raise ConfigError(f"reward.timeout_s is {timeout_s}; it must be above 0")
        self._policy = OutcomePolicy(on_failure)
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards the policy's counts and the two fields below
        self._answers: list[tuple[str, Reward]] = []
        self._outstanding = 0
        self._supervisor = Supervisor(
            lambda: WorkerProcess(verifier, memory_mb, start_timeout_s=start_timeout_s, log=log),
            workers=workers,
            timeout_s=timeout_s,
            answer=self._answer,
            on_broken=self._notify,
        )

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Queue requests; returns at once.

        Raises RunFailed, taking none, when no worker can be started any more.
        """
        items = [
            Item(number=next(self._numbers), trajectory_id=request.trajectory_id, blob=_pickled(request))
            for request in requests
        ]
        with self._changed:
            self._outstanding += len(items)
        try:
            self._supervisor.submit(items)
        except RunFailed:
            with self._changed:
                self._outstanding -= len(items)
            raise

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reward]]:
        """All answers not yet returned, in order of completion; waits up to `timeout_s` for the first.

        Raises RunFailed when no worker can be started any more and every answer was returned.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._supervisor.broken, timeout_s)
            if not self._answers and self._supervisor.broken:
                raise RunFailed(self._supervisor.broken)
            answers, self._answers = self._answers, []
            self._outstanding -= len(answers)
            return answers

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet returned by `poll`."""
        with self._changed:
            return self._outstanding

    def counts(self) -> RewardCounts:
        """Answers by kind since the start."""
        with self._changed:
            return self._policy.counts()

    def worker_pids(self) -> list[int]:
        """Process ids of the present workers."""
        return self._supervisor.pids()

    def close(self) -> None:
        """Kill the workers and all their children. Unanswered requests stay so. May be called twice."""
        self._supervisor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, item: Item, outcome: VerifierOutcome) -> None:
        with self._changed:
            self._answers.append((item.trajectory_id, self._policy.reward(item.trajectory_id, outcome)))
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _pickled(request: ScoreRequest) -> bytes:
    try:
        return pickle.dumps(request)
    except Exception as error:  # the worker raises it, so that it is answered and counted as an error
        return pickle.dumps(_Unpicklable(f"the request cannot be pickled: {error}"))


class _Unpicklable:
    """Raises where it is unpickled."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _raise_pickle_error, (self._message,)


def _raise_pickle_error(message: str) -> None:
    raise pickle.PickleError(message)
