"""Environments outside the loop: every question is answered once, whatever the environment does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from staleflow.data.environment import Answer, Done, Failed, Given, ScriptedTurns, Waiting, load_environment
from staleflow.data.environment_pool import Answers, EnvironmentPool, InlineEnvironments, ask
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.errors import ConfigError

LIMIT_S = 120.0


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
        Scripted(a=lambda: Given(tokens=(1,)), b=Done, c=lambda: Waiting(limit_s=3.0)), workers=2, timeout_s=9
    )
    pool.submit([trajectory("a"), trajectory("b"), trajectory("c")])
    assert dict(collect(pool, 3)) == {"a": Given(tokens=(1,)), "b": Done(), "c": Waiting(limit_s=3.0)}
    assert pool.poll(0.0) == []
    pool.close()


def test_an_exception_and_a_wrong_answer_fail_and_no_tokens_are_the_end() -> None:
    def broken() -> Answer:
        raise ValueError("no such tool")

    environment = Scripted(a=broken, b=lambda: "yes", c=lambda: Given(tokens=()))  # type: ignore[arg-type,return-value]
    expected = {
        "a": Failed(reason="its environment raised ValueError: no such tool"),
        "b": Failed(reason="its environment answered with a str"),
        "c": Done(),
    }
    assert {name: ask(environment, trajectory(name)) for name in "abc"} == expected
    inline = InlineEnvironments(environment)
    inline.submit([trajectory(name) for name in "cab"])
    assert inline.poll(0.0) == [(name, expected[name]) for name in "cab"]
    assert inline.poll(0.0) == []


def test_one_that_hangs_fails_at_its_limit_and_the_others_go_on() -> None:
    """One worker: what waits behind the hanging question is asked by the thread that takes its place."""
    time, asked, released = ManualTime(), threading.Event(), threading.Event()

    def hang() -> Answer:
        asked.set()
        released.wait(LIMIT_S)
        return Done()

    pool = EnvironmentPool(Scripted(a=hang, b=Done), workers=1, timeout_s=5.0, now=time)
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


def test_so_many_are_asked_at_once_and_no_more() -> None:
    together = threading.Barrier(3)

    def meet() -> Answer:
        together.wait(LIMIT_S)
        return Done()

    pool = EnvironmentPool(Scripted(a=meet, b=meet, c=meet), workers=3, timeout_s=2 * LIMIT_S)
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
