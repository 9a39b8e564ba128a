"""The reward pool when verifiers behave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.data.trajectory import Reward
from staleflow.errors import ConfigError
from staleflow.reward.pool import RewardPool
from staleflow.reward.verifiers import ScoreRequest


def request(trajectory_id: str, response: str, answer: Any) -> ScoreRequest:
    return ScoreRequest(trajectory_id=trajectory_id, prompt="?", response=response, answer=answer)


def collect(pool: RewardPool, count: int, within_s: float = 30.0) -> list[tuple[str, Reward]]:
    answers: list[tuple[str, Reward]] = []
    deadline = time.monotonic() + within_s
    while len(answers) < count and time.monotonic() < deadline:
        answers += pool.poll(0.5)
    return answers


def test_thousands_of_cheap_requests_a_second_each_answered_once() -> None:
    count = 8000
    with RewardPool("exact_match", workers=2) as pool:
        start = time.monotonic()
        pool.submit([request(f"t{i}", str(i % 2), 1) for i in range(count)])
        answers = collect(pool, count)
        seconds = time.monotonic() - start
        assert pool.poll(0.0) == []
        assert pool.outstanding == 0
    assert sorted(trajectory_id for trajectory_id, _ in answers) == sorted(f"t{i}" for i in range(count))
    assert all(reward.raw == float(int(name[1:]) % 2) for name, reward in answers)
    assert count / seconds > 2000
    assert pool.counts().scored_count == count


def test_a_trajectory_submitted_twice_is_answered_twice() -> None:
    with RewardPool("exact_match") as pool:
        pool.submit([request("t", "1", 1), request("t", "2", 1)])
        assert sorted(reward.raw for _, reward in collect(pool, 2)) == [0.0, 1.0]


def test_poll_waits_no_longer_than_told() -> None:
    with RewardPool("exact_match") as pool:
        start = time.monotonic()
        assert pool.poll(0.2) == []
        assert 0.2 <= time.monotonic() - start < 2.0


def test_a_request_that_cannot_be_pickled_is_an_error_and_answered() -> None:
    with RewardPool("exact_match", on_failure="mask") as pool:
        pool.submit([request("bad", "1", lambda: 1), request("good", "1", 1)])
        answers = dict(collect(pool, 2))
    assert (answers["bad"].status, answers["bad"].usable) == ("error", False)
    assert answers["good"].raw == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verifier": "exact_mach"}, "did you mean exact_match"),
        ({"verifier": "no_such_package.score"}, "importing no_such_package failed"),
        ({"verifier": "exact_match", "workers": 0}, "workers is 0"),
        ({"verifier": "exact_match", "timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"verifier": "exact_match", "memory_mb": -1}, "memory_mb is -1"),
        ({"verifier": "exact_match", "on_failure": "ignore"}, "on_failure is 'ignore'"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardPool(**arguments)


def test_what_a_verifier_prints_goes_to_the_log_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty.py").write_text("def score(request):\n    print('hello', flush=True)\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    log = tmp_path / "reward.log"
    with RewardPool("chatty.score", log=log) as pool:
        pool.submit([request("t", "", "")])
        assert collect(pool, 1)[0][1].raw == 1.0
    assert log.read_text() == "hello\n"
    assert capfd.readouterr() == ("", "")
