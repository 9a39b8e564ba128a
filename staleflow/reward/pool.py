"""Verifiers in worker processes with hard limits.

Invariants:

- every submitted request is answered exactly once, whatever its verifier does;
- a request is tried once: if it hangs, crashes or takes too much memory, the policy scores and counts it, and
  other requests are unaffected;
- limits do not depend on the verifier's cooperation: one of the pool's threads enforces time by SIGKILL to
  the worker and all its descendants, and the kernel enforces memory;
- loading a verifier counts against `start_timeout_s`, never against a request's limit.

::

    submit -> queue -> supervisor's thread -- batches --> worker 0..n-1 (one process each)
                              |           <-- answers --
    poll <--- answers <-------+           --- SIGKILL at the limit, then a new worker

It guards against accidents and is not a sandbox: the memory limit is per process, and a verifier that crashes
its worker after starting a process in a new session leaves that process behind.
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
    """Scores trajectories; see the module. A context manager; its methods are thread-safe."""

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

        `timeout_s`: wall time limit of one request. `memory_mb`: memory that a worker may use beyond that of
        the loaded verifier; 0: unlimited. `log`: file for the verifiers' output; None drops it. Raises
        ConfigError for an invalid argument or a verifier that cannot be used.
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

        Raises RunFailed, queueing none, if no worker can be started.
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

        Raises RunFailed if no worker can be started and all answers have been returned.
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
        """Process ids of the current workers."""
        return self._supervisor.pids()

    def close(self) -> None:
        """Kill the workers and all their children. Open requests stay unanswered. May be called twice."""
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
    except Exception as error:  # let the worker raise it, so that it is answered and counted as an error
        return pickle.dumps(_Unpicklable(f"the request cannot be pickled: {error}"))


class _Unpicklable:
    """Raises PickleError when unpickled."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _raise_pickle_error, (self._message,)


def _raise_pickle_error(message: str) -> None:
    raise pickle.PickleError(message)
