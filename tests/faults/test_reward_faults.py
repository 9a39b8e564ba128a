"""Verifiers that hang, crash, allocate or fork without end (F24) or raise (F16), in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleflow.data.trajectory import Reward
from staleflow.errors import ConfigError, RunFailed
from staleflow.reward.pool import RewardPool
from staleflow.reward.verifiers import ScoreRequest

LIMIT_S = 1.0
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _hostile_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    with RewardPool(
        "hostile_verifiers.score", workers=2, timeout_s=LIMIT_S, memory_mb=64, on_failure="mask"
    ) as pool:
        yield pool


def request(trajectory_id: str, response: str, answer: str = "yes") -> ScoreRequest:
    return ScoreRequest(trajectory_id=trajectory_id, prompt="", response=response, answer=answer)


def collect(pool: RewardPool, count: int, within_s: float = 30.0) -> list[tuple[str, Reward]]:
    answers: list[tuple[str, Reward]] = []
    deadline = time.monotonic() + within_s
    while len(answers) < count and time.monotonic() < deadline:
        answers += pool.poll(0.2)
    return answers + pool.poll(0.0)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def all_gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("fault", "statuses"),
    [
        ("busy_loop", {"timeout"}),
        ("c_level_sleep", {"timeout"}),
        ("python_sleep", {"timeout"}),
        ("power_tower", {"timeout", "memory"}),
        ("catches_everything", {"timeout"}),
        ("closes_every_pipe", {"timeout"}),
        ("endless_allocation", {"memory"}),
        ("hard_exit", {"crash"}),
        ("segfault", {"crash"}),
        ("raises", {"error"}),
    ],
)
def test_a_pathological_answer_ends_at_its_limit_is_counted_and_disturbs_nobody(
    pool: RewardPool, fault: str, statuses: set[str]
) -> None:
    """F24, F16."""
    good = [request(f"good{i}", "yes") for i in range(40)]
    start = time.monotonic()
    pool.submit([*good[:20], request("bad", fault), *good[20:]])
    answers = collect(pool, 41)
    # A restart of the worker and a busy machine are no part of the limit, so the bound is generous.
    assert time.monotonic() - start < LIMIT_S + 8
    assert len(answers) == 41
    rewards = dict(answers)
    bad = rewards.pop("bad")
    assert bad.status in statuses
    assert (bad.raw, bad.usable) == (0.0, False)
    assert bad.seconds < LIMIT_S + 3
    assert len(rewards) == 40
    assert all(reward.status == "ok" and reward.raw == 1.0 for reward in rewards.values())
    counts = pool.counts()
    assert counts.scored_count == 40
    assert getattr(counts, f"{bad.status}_count") == 1


def test_many_failures_in_one_batch_are_each_answered_once(pool: RewardPool) -> None:
    kinds = {"hard_exit": "crash", "raises": "error", "endless_allocation": "memory", "yes": "ok"}
    names = ["yes"] * 60 + ["hard_exit", "raises", "yes", "endless_allocation", "hard_exit"] + ["yes"] * 60
    pool.submit([request(f"{i}", name) for i, name in enumerate(names)])
    answers = collect(pool, len(names))
    assert sorted(int(trajectory_id) for trajectory_id, _ in answers) == list(range(len(names)))
    for trajectory_id, reward in answers:
        assert reward.status == kinds[names[int(trajectory_id)]]


def test_under_the_zero_policy_a_timeout_scores_zero_and_is_used() -> None:
    """F24."""
    with RewardPool("hostile_verifiers.score", timeout_s=0.3, on_failure="zero") as pool:
        pool.submit([request("bad", "busy_loop")])
        assert [(name, reward.raw, reward.status, reward.usable) for name, reward in collect(pool, 1)] == [
            ("bad", 0.0, "timeout", True)
        ]


@pytest.mark.parametrize(("fault", "status"), [("bomb_and_hang", "timeout"), ("bomb_and_return", "ok")])
def test_the_processes_that_a_verifier_forks_die_with_its_request(
    tmp_path: Path, fault: str, status: str
) -> None:
    """F24: whether it hangs or returns, also those in a session of their own."""
    with RewardPool("hostile_verifiers.score", timeout_s=5.0) as pool:
        pool.submit([request("bomb", fault, str(tmp_path))])
        assert [reward.status for _, reward in collect(pool, 1)] == [status]
        forked = [int(entry.name) for entry in tmp_path.iterdir()]
        assert len(forked) == 8
        assert all_gone(forked)
        pool.submit([request("next", "yes")])
        assert [reward.raw for _, reward in collect(pool, 1)] == [1.0]


def test_a_forked_child_that_comes_back_answers_nothing(pool: RewardPool) -> None:
    pool.submit([request("fork", "child_returns_too"), *(request(f"{i}", "yes") for i in range(20))])
    answers = collect(pool, 21)
    assert len(answers) == 21
    assert all(reward.raw == 1.0 for _, reward in answers)


def test_a_worker_killed_from_outside_is_replaced(pool: RewardPool) -> None:
    before = pool.worker_pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    pool.submit([request(f"{i}", "yes") for i in range(10)])
    answers = collect(pool, 10)
    # One killed before its first batch has nobody to blame; with a batch on its way, that batch's head.
    assert len(answers) == 10
    assert sum(reward.status == "ok" for _, reward in answers) >= 8
    assert not set(before) & set(pool.worker_pids())


def test_a_stopped_worker_counts_as_hanging(pool: RewardPool) -> None:
    for pid in pool.worker_pids():
        os.kill(pid, signal.SIGSTOP)
    pool.submit([request(f"{i}", "yes") for i in range(10)])
    answers = collect(pool, 10)
    assert len(answers) == 10
    assert {reward.status for _, reward in answers} <= {"ok", "timeout"}


def test_loading_the_verifier_is_no_part_of_the_limit_but_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(1)\ndef score(r): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardPool("slow_to_load.score", timeout_s=0.3) as pool:
        pool.submit([request("t", "")])
        assert [reward.status for _, reward in collect(pool, 1)] == ["ok"]
    with pytest.raises(ConfigError, match="a worker took too long to load it"):
        RewardPool("slow_to_load.score", start_timeout_s=0.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('no licence')", "importing broken failed with RuntimeError: no licence"),
        ("import sys; sys.exit('no gpu')", "no gpu"),
        ("import os; os._exit(5)", "a worker died loading it .exit code 5."),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        RewardPool("broken.score", workers=2)


def test_when_workers_cannot_be_started_any_more_all_are_answered_and_the_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "broken now"
    (tmp_path / "once.py").write_text(
        f"import os\nif os.path.exists({str(marker)!r}): raise RuntimeError('gone')\n"
        f"def score(request):\n    open({str(marker)!r}, 'w').close()\n    os._exit(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardPool("once.score", on_failure="zero") as pool:
        pool.submit([request(f"{i}", "") for i in range(5)])
        answers: list[tuple[str, Reward]] = []
        while len(answers) < 5:
            answers += pool.poll(10.0)
        with pytest.raises(RunFailed, match="gone"):
            pool.poll(10.0)
        assert sorted(name for name, _ in answers) == list("01234")
        statuses = sorted(reward.status for _, reward in answers)
        assert statuses == ["crash", "failed", "failed", "failed", "failed"]
        assert all(not reward.usable for _, reward in answers if reward.status == "failed")
        with pytest.raises(RunFailed, match="gone"):
            pool.submit([request("later", "")])


def test_closing_in_the_middle_leaves_no_process(tmp_path: Path) -> None:
    pool = RewardPool("hostile_verifiers.score", workers=2, timeout_s=60.0)
    pool.submit([request("hang", "busy_loop"), request("bomb", "bomb_and_hang", str(tmp_path))])
    while len(list(tmp_path.iterdir())) < 8:
        time.sleep(0.02)
    pids = pool.worker_pids() + [int(entry.name) for entry in tmp_path.iterdir()]
    pool.close()
    pool.close()
    assert all_gone(pids)


def test_workers_die_with_a_killed_parent() -> None:
    script = (
        "import sys, time\n"
        "from staleflow.reward.pool import RewardPool\n"
        "from staleflow.reward.verifiers import ScoreRequest\n"
        "pool = RewardPool('hostile_verifiers.score', workers=2, timeout_s=100)\n"
        "hang = [ScoreRequest(trajectory_id=n, prompt='', response='busy_loop', answer='') for n in 'ab']\n"
        "pool.submit(hang)\n"
        "print(*pool.worker_pids(), flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all_gone(pids)
