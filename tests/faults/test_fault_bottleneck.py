"""The slow side of a run is named, and nobody is blamed where no side is slow (F39)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config
from whole_runs import watched_engines

from staleflow.audit import audit_ledger
from staleflow.coordination.actions import Command, Pull
from staleflow.data.trajectory import Trajectory
from staleflow.reporting.bottleneck import Bottleneck
from staleflow.reporting.groups import group_runs
from staleflow.reporting.load import load_run
from staleflow.runtime.backends.inline import InlinePace

COMMON = ("run.steps=12", "training.dynamic_sampling=false", "telemetry.wandb.mode=disabled")
EVEN = ("rollout.fake.lengths.kind=fixed", "rollout.fake.lengths.mean=24")


def run_of(model: Path, folder: Path, pace: InlinePace, *overrides: str, **parts: Any) -> ToyRun:
    run = ToyRun(toy_config(model, folder, *COMMON, *overrides), folder, **parts)
    run.loop._backend._pace = pace  # type: ignore[attr-defined]
    return run


def verdict(run: ToyRun, folder: Path) -> Bottleneck:
    """Run it, and read what its files say."""
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    rows = [{"kind": row.kind, "time": row.time, **row.values} for row in run.monitor.take_rows()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(run.config.to_yaml())
    (group,) = group_runs([load_run(folder)])
    causes = group.shares.waiting_for
    assert sum(causes.values()) == pytest.approx(group.shares.trainer_waiting)
    return group.verdict


def test_slow_decoding_is_rollout_bound_and_wants_a_larger_share(model: Path, tmp_path: Path) -> None:
    """F39: a batch takes 9 × 24 decode steps on places for 4, and a training step two polls."""
    pace = InlinePace(decode_steps=1, train_polls=2)
    found = verdict(run_of(model, tmp_path, pace, *EVEN, "rollout.max_running=2"), tmp_path)
    assert found.kind == "rollout-bound", found.text
    assert "Move resources from training to rollout" in found.advice
    assert found.split is not None
    assert found.split_now is not None
    assert found.split[0] / found.split[1] > found.split_now[0] / found.split_now[1]


def test_a_slow_trainer_is_trainer_bound_and_wants_a_larger_share(model: Path, tmp_path: Path) -> None:
    """F39: a batch is generated in a few polls, and trained on in 40."""
    pace = InlinePace(decode_steps=8, train_polls=40)
    found = verdict(run_of(model, tmp_path, pace, *EVEN), tmp_path)
    assert found.kind == "trainer-bound", found.text
    assert "Move resources from rollout to training" in found.advice
    assert found.split is not None
    assert found.split_now is not None
    assert found.split[0] / found.split[1] < found.split_now[0] / found.split_now[1]


def test_a_slow_verifier_is_reward_bound(model: Path, tmp_path: Path) -> None:
    """F39: one answer every fourth poll, and nine make a batch; all else is quick."""
    run = run_of(model, tmp_path, InlinePace(decode_steps=24, train_polls=2), *EVEN)
    scorer = run.loop._backend._scorer  # type: ignore[attr-defined]
    original, waiting, polls = scorer.poll, [], [0]

    def poll(timeout_s: float) -> list[Any]:
        waiting.extend(original(timeout_s))
        polls[0] += 1
        return [waiting.pop(0)] if waiting and polls[0] % 4 == 0 else []

    scorer.poll = poll
    found = verdict(run, tmp_path)
    assert found.kind == "reward-bound", found.text
    assert "reward.workers from 1 to" in found.advice


def test_a_few_long_responses_are_latency_bound(model: Path, tmp_path: Path) -> None:
    """F39: one member in nine is 50 times as long as the others, and decodes alone. More instances would not
    help, so no split is suggested."""

    def length(trajectory: Trajectory) -> int:
        group, _, member = trajectory.trajectory_id.rpartition("-m")
        prompt = int(group.split("-")[1].removeprefix("p"))
        return 200 if member == "0" and prompt % 3 == 0 else 4

    options = ("rollout.max_new_tokens=200", "data.shuffle=false")
    config = toy_config(model, tmp_path, *COMMON, *options)
    make_engine, _ = watched_engines(config, lengths=length)
    run = run_of(
        model, tmp_path, InlinePace(decode_steps=4, train_polls=3), *options, make_engine=make_engine
    )
    found = verdict(run, tmp_path)
    assert found.kind == "latency-bound", found.text
    assert found.split is None


def test_slow_pulls_are_pull_bound(model: Path, tmp_path: Path) -> None:
    """F39: an instance that was told to pull does nothing for 25 polls, and a batch is generated in a few."""
    run = run_of(model, tmp_path, InlinePace(decode_steps=24, train_polls=2), *EVEN, "staleness.bound=0")
    backend: Any = run.loop._backend
    deliver, work, loading = backend.deliver, backend._work, {}

    def delivered(instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        if any(isinstance(command, Pull) for command in commands):
            loading[instance] = 25
        deliver(instance, commands, payloads)

    def worked(instance: str) -> None:
        if loading.get(instance, 0) > 0:
            loading[instance] -= 1
        else:
            work(instance)

    backend.deliver, backend._work = delivered, worked
    found = verdict(run, tmp_path)
    assert found.kind == "pull-bound", found.text


def test_sides_that_take_turns_are_told_so_and_none_is_blamed(model: Path, tmp_path: Path) -> None:
    """F39: at bound 0 a batch is generated in ten polls and trained on in ten, one after the other."""
    pace = InlinePace(decode_steps=3, train_polls=10)
    found = verdict(run_of(model, tmp_path, pace, *EVEN, "staleness.bound=0"), tmp_path)
    assert found.kind == "taking turns", found.text
    assert "staleness.bound: 0 alternates them" in found.advice


def test_where_both_sides_keep_up_nobody_is_blamed(model: Path, tmp_path: Path) -> None:
    """F39: places for 4 decode a batch of 9 × 24 tokens in 18 polls, training takes 17, and they overlap."""
    pace = InlinePace(decode_steps=3, train_polls=17)
    options = ("staleness.bound=2", "rollout.max_running=2", "run.steps=30")
    found = verdict(run_of(model, tmp_path, pace, *EVEN, *options), tmp_path)
    assert found.kind == "balanced", found.text
    assert found.advice == ""
