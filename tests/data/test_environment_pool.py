"""Environments outside the loop: every question is answered once, whatever the environment does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from staleflow.data.environment import Answer, Done, Failed, Given, ScriptedTurns, Waiting, load_environment
from staleflow.data.environment_pool import Answers, EnvironmentPool, InlineEnvironments, ask
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.errors import ConfigError

LIMIT_S = 120.0
VOCABULARY = 10


def trajectory(name: str) -> Trajectory:
    prompt = Prompt(prompt_id="0", tokens=(5,), text="", answer=None)
    return Trajectory(trajectory_id=name, group_id="g", member=0, prompt=prompt, max_new_tokens=8)


class Scripted:
    """Answers by what is scripted for a trajectory's id."""

    def __init__(self, **answers: Callable[[], Answer]) -> None:
        self._answers = answers

    def respond(self, trajectory: Trajectory) -> Answer:
        return self._answers[trajectory.trajectory_id]()


class ManualTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def collect(pool: EnvironmentPool, count: int) -> Answers:
    """Poll until so many answers have come."""
    answers: Answers = []
    while len(answers) < count:
        more = pool.poll(LIMIT_S)
        assert more, "no answer has come"
        answers += more
    return answers


def test_answers_come_as_they_are_given_and_each_once() -> None:
    pool = EnvironmentPool(
        Scripted(a=lambda: Given(tokens=(1,)), b=Done, c=lambda: Waiting(limit_s=3.0)),
        vocab_size=VOCABULARY,
        workers=2,
        timeout_s=LIMIT_S,
    )
    pool.submit([trajectory("a"), trajectory("b"), trajectory("c")])
    assert dict(collect(pool, 3)) == {"a": Given(tokens=(1,)), "b": Done(), "c": Waiting(limit_s=3.0)}
    assert pool.poll(0.0) == []
    pool.close()


class Unreadable:
    """Not a sequence of token ids."""

    def __iter__(self) -> None:
        raise RuntimeError("closed")


def raises(error: BaseException) -> Answer:
    raise error


UNUSABLE: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (lambda: raises(ValueError("no such tool")), "its environment raised ValueError: no such tool"),
    "exits": (lambda: raises(SystemExit(3)), "its environment raised SystemExit: 3"),
    "text": (lambda: "yes", "it is a str, not Given, Waiting, Done or Failed"),
    "nothing": (lambda: None, "it is a NoneType, not Given, Waiting, Done or Failed"),
    "words": (lambda: Given(tokens=("a",)), "'str' object cannot be interpreted as an integer"),  # type: ignore[arg-type]
    "fractions": (lambda: Given(tokens=(1.5,)), "'float' object cannot be interpreted as an integer"),  # type: ignore[arg-type]
    "no list": (lambda: Given(tokens=Unreadable()), "closed"),  # type: ignore[arg-type]
    "below": (lambda: Given(tokens=(3, -1)), "token -1 is not in the vocabulary of 10 tokens"),
    "beyond": (lambda: Given(tokens=(9, 10)), "token 10 is not in the vocabulary of 10 tokens"),
    "never": (lambda: Waiting(limit_s=float("inf")), "a limit of inf s; it must be finite and above 0"),
    "no time": (lambda: Waiting(limit_s=0.0), "a limit of 0 s; it must be finite and above 0"),
}


def test_an_exception_and_an_unusable_answer_fail_and_the_threads_live_on() -> None:
    """One worker answers them all, so none of them ended its thread."""
    environment = Scripted(**{name: make for name, (make, _) in UNUSABLE.items()})  # type: ignore[arg-type]
    pool = EnvironmentPool(environment, vocab_size=VOCABULARY, workers=1, timeout_s=LIMIT_S)
    pool.submit([trajectory(name) for name in UNUSABLE])
    answers = collect(pool, len(UNUSABLE))
    assert [name for name, _ in answers] == list(UNUSABLE)
    for name, answer in answers:
        assert isinstance(answer, Failed), name
        assert UNUSABLE[name][1] in answer.reason
    pool.close()


def test_numpy_tokens_are_as_good_and_no_tokens_are_the_end() -> None:
    environment = Scripted(
        a=lambda: Given(tokens=np.array([1, 2])),  # type: ignore[arg-type]
        b=lambda: Given(tokens=np.array([], dtype=np.int32)),  # type: ignore[arg-type]
        c=lambda: Given(tokens=()),
    )
    answers = {name: ask(environment, trajectory(name), VOCABULARY) for name in "abc"}
    assert answers == {"a": Given(tokens=(1, 2)), "b": Done(), "c": Done()}


def test_inline_answers_come_in_the_order_of_the_questions_and_once() -> None:
    environment = Scripted(a=lambda: raises(ValueError("no")), b=lambda: Given(tokens=(1,)), c=Done)
    inline = InlineEnvironments(environment, vocab_size=VOCABULARY)
    inline.submit([trajectory("c"), trajectory("a")])
    inline.submit([trajectory("b")])
    assert inline.poll(0.0) == [
        ("c", Done()),
        ("a", Failed(reason="its environment raised ValueError: no")),
        ("b", Given(tokens=(1,))),
    ]
    assert inline.poll(0.0) == []


def test_one_that_hangs_fails_at_its_limit_and_the_others_go_on() -> None:
    """One worker: what waits behind the hanging question is asked by the thread that takes its place."""
    time, asked, released = ManualTime(), threading.Event(), threading.Event()

    def hang() -> Answer:
        asked.set()
        released.wait(LIMIT_S)
        return Done()

    pool = EnvironmentPool(
        Scripted(a=hang, b=Done), vocab_size=VOCABULARY, workers=1, timeout_s=5.0, now=time
    )
    pool.submit([trajectory("a"), trajectory("b")])
    assert asked.wait(LIMIT_S)
    time.now = 4.9
    assert pool.poll(0.0) == []
    time.now = 5.0
    reason = "its environment did not answer within environment.timeout_s = 5 s"
    assert pool.poll(0.0) == [("a", Failed(reason=reason))]
    assert collect(pool, 1) == [("b", Done())]
    released.set()  # its late answer counts no more
    pool.submit([trajectory("b")])
    assert collect(pool, 1) == [("b", Done())]
    pool.close()


def test_a_poll_ends_when_the_limit_of_a_hanging_question_is_reached() -> None:
    """Not only when its own time is up: that is 10 minutes here, and the question was asked during it."""
    released = threading.Event()

    def hang() -> Answer:
        released.wait(LIMIT_S)
        return Done()

    pool = EnvironmentPool(Scripted(a=hang), vocab_size=VOCABULARY, workers=1, timeout_s=0.05)
    pool.submit([trajectory("a")])
    ((name, answer),) = pool.poll(5 * LIMIT_S)
    assert name == "a"
    assert isinstance(answer, Failed)
    assert not released.is_set()
    released.set()
    pool.close()


def test_after_the_end_nothing_is_asked() -> None:
    asked = []

    def note() -> Answer:
        asked.append(1)
        return Done()

    pool = EnvironmentPool(Scripted(a=note), vocab_size=VOCABULARY, workers=1, timeout_s=LIMIT_S)
    pool.close()
    pool.close()
    pool.submit([trajectory("a")])
    assert pool.poll(0.01) == []
    assert asked == []


def test_so_many_are_asked_at_once_and_no_more() -> None:
    together = threading.Barrier(3)

    def meet() -> Answer:
        together.wait(LIMIT_S)
        return Done()

    pool = EnvironmentPool(
        Scripted(a=meet, b=meet, c=meet), vocab_size=VOCABULARY, workers=3, timeout_s=2 * LIMIT_S
    )
    pool.submit([trajectory(name) for name in "abc"])
    assert sorted(name for name, _ in collect(pool, 3)) == ["a", "b", "c"]
    pool.close()


def test_names_paths_and_options() -> None:
    assert load_environment("single_turn", {}) is None
    assert isinstance(load_environment("scripted_turns", {"turns": [[1, 2]]}), ScriptedTurns)
    with pytest.raises(ConfigError, match=r"environment\.options are given, but single_turn takes none"):
        load_environment("single_turn", {"turns": []})
    with pytest.raises(ConfigError, match=r"cannot be made with options \{\}"):
        load_environment("scripted_turns", {})
    with pytest.raises(ConfigError, match="did you mean scripted_turns"):
        load_environment("scripted_turn", {})
