"""Calls environments outside the run loop, in threads, each call with a time limit.

Invariants: every submitted trajectory is answered exactly once; an exception, an answer that cannot be used
and a question that takes too long are `Failed`; a thread that is late is abandoned, and another takes its
place, so that a hanging environment blocks nothing but its own questions.

The limit counts from the moment a thread asks, so it does not include the time in the queue. An abandoned
thread runs until its environment returns, because Python cannot end it.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from staleflow.data.environment import Answer, Done, Environment, Failed, Given, Waiting
from staleflow.data.trajectory import Trajectory

Answers = list[tuple[str, Answer]]
_SHORTEST_WAIT_S = 0.001


def ask(environment: Environment, trajectory: Trajectory, vocab_size: int) -> Answer:
    """What the environment answers; Failed where it raises or its answer cannot be used."""
    try:
        answer = environment.respond(trajectory)
    except (Exception, SystemExit) as error:  # an exit would end a thread without an answer
        return Failed(reason=f"its environment raised {type(error).__name__}: {error}")
    try:
        return _checked(answer, vocab_size)
    except Exception as error:
        return Failed(reason=f"its environment's answer cannot be used: {error}")


def _checked(answer: object, vocab_size: int) -> Answer:
    """The answer with plain values. Raises whatever is wrong with it."""
    match answer:
        case Given():
            tokens = tuple(operator.index(token) for token in answer.tokens)
            unknown = [token for token in tokens if not 0 <= token < vocab_size]
            if unknown:
                raise ValueError(f"token {unknown[0]} is not in the vocabulary of {vocab_size} tokens")
            return Given(tokens=tokens) if tokens else Done()
        case Waiting():
            limit_s = float(answer.limit_s)
            if not 0 < limit_s < math.inf:
                raise ValueError(f"a limit of {limit_s:g} s; it must be finite and above 0")
            return Waiting(limit_s=limit_s)
        case Done() | Failed():
            return answer
    raise TypeError(f"it is a {type(answer).__name__}, not Given, Waiting, Done or Failed")


class InlineEnvironments:
    """Asks at once, in the caller's thread, without a time limit: for the deterministic inline runs."""

    def __init__(self, environment: Environment, *, vocab_size: int) -> None:
        self._environment = environment
        self._vocab_size = vocab_size
        self._answers: Answers = []

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask what follows each."""
        self._answers += [
            (t.trajectory_id, ask(self._environment, t, self._vocab_size)) for t in trajectories
        ]

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
        vocab_size: int,
        workers: int,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment.respond` is called by up to `workers` threads at the same time."""
        self._environment = environment
        self._vocab_size = vocab_size
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
            self._give_up_late()
            while not self._answers and timeout_s > 0:
                wait_s = min(timeout_s, self._next_limit_s())
                self._changed.wait_for(lambda: self._answers, wait_s)
                timeout_s -= wait_s
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

    def _next_limit_s(self) -> float:
        """Seconds until a question can be late, one that is asked from now on included."""
        ends = [question.began + self._timeout_s - self._now() for question in self._asked]
        return max(_SHORTEST_WAIT_S, min([self._timeout_s, *ends]))

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
            answer = ask(self._environment, question.trajectory, self._vocab_size)
            with self._changed:
                if question.answered:
                    return  # too late: this thread has been replaced
                self._answer(question, answer)
