"""Calls environments outside the run loop, in threads, each call with a time limit.

Invariants: every submitted trajectory is answered exactly once; an exception, a result of the wrong type and
a call that takes too long give `Failed`; a late thread is abandoned and replaced, so that a hanging
environment blocks only its own calls.

An abandoned thread runs until its environment returns, because Python cannot end a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import get_args

from staleflow.data.environment import Answer, Done, Environment, Failed, Given
from staleflow.data.trajectory import Trajectory

Answers = list[tuple[str, Answer]]


def ask(environment: Environment, trajectory: Trajectory) -> Answer:
    """The environment's answer; Failed if it raises or returns anything else."""
    try:
        answer = environment.respond(trajectory)
    except Exception as error:
        return Failed(reason=f"its environment raised {type(error).__name__}: {error}")
    if not isinstance(answer, get_args(Answer)):
        return Failed(reason=f"its environment answered with a {type(answer).__name__}")
    return Done() if isinstance(answer, Given) and not answer.tokens else answer


class InlineEnvironments:
    """Calls at once, in the caller's thread: for runs in one process, which are exactly reproducible."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._answers: Answers = []

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Call the environment for each."""
        self._answers += [(t.trajectory_id, ask(self._environment, t)) for t in trajectories]

    def poll(self, timeout_s: float) -> Answers:
        """The answers since the last call; never waits."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Nothing to stop."""


class _Question:
    """One environment call. `answered` is set once, by the thread or at the time limit."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.began = 0.0
        self.answered = False


class EnvironmentPool:
    """See the module. `submit` and `poll` are called by one thread."""

    def __init__(
        self,
        environment: Environment,
        *,
        workers: int,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment.respond` is called by up to `workers` threads at the same time."""
        self._environment = environment
        self._timeout_s = timeout_s
        self._now = now
        self._changed = threading.Condition()
        self._waiting: deque[_Question] = deque()
        self._asked: list[_Question] = []
        self._answers: Answers = []
        self._closed = False
        for _ in range(workers):
            self._start()

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Queue calls; returns at once."""
        with self._changed:
            self._waiting.extend(map(_Question, trajectories))
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> Answers:
        """The answers since the last call; waits up to `timeout_s` for the first."""
        with self._changed:
            if not self._answers and timeout_s > 0:
                self._changed.wait_for(lambda: self._answers, timeout_s)
            self._give_up_late()
            answers, self._answers = self._answers, []
            return answers

    def close(self) -> None:
        """Start no more calls; threads end with their current call. May be called twice."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up_late(self) -> None:
        latest = self._now() - self._timeout_s
        for question in [q for q in self._asked if q.began <= latest]:
            reason = f"its environment did not answer within environment.timeout_s = {self._timeout_s:g} s"
            self._answer(question, Failed(reason=reason))
            self._start()

    def _answer(self, question: _Question, answer: Answer) -> None:
        question.answered = True
        self._asked.remove(question)
        self._answers.append((question.trajectory.trajectory_id, answer))
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                question = self._waiting.popleft()
                question.began = self._now()
                self._asked.append(question)
            answer = ask(self._environment, question.trajectory)
            with self._changed:
                if question.answered:
                    return  # too late: this thread has been replaced
                self._answer(question, answer)
