"""Whole runs in one process where an environment, a part or the person does something unusual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config

from staleflow.audit import audit_ledger
from staleflow.data.environment import Done, Given, Waiting
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine
from staleflow.rollout.scripted_lengths import long_tailed
from staleflow.servers.trajectory_server import generated_tokens
from staleflow.training.checkpoints import newest_whole

NO_FILTER = "training.dynamic_sampling=false"


class SlowEnvironment:
    """Answers member 0 of each group only at the `patience`-th question (None: never)."""

    def __init__(self, patience: int | None, answer: Given | Done, limit_s: float) -> None:
        self._patience, self._answer, self._limit_s = patience, answer, limit_s
        self._asked: dict[str, int] = {}

    def respond(self, trajectory: Trajectory) -> Given | Waiting | Done:
        if trajectory.member != 0 or len(trajectory.segments) > 1:
            return Done()
        asked = self._asked[trajectory.trajectory_id] = self._asked.get(trajectory.trajectory_id, 0) + 1
        if self._patience is not None and asked >= self._patience:
            return self._answer
        return Waiting(limit_s=self._limit_s)


@pytest.mark.parametrize(
    ("patience", "answer", "masked"),
    [(5, Done(), False), (5, Given(tokens=(3, 4)), False), (None, Done(), True)],
    ids=["ends late", "goes on late", "never answers"],
)
def test_an_environment_that_answers_late_or_never(
    patience: int | None, answer: Given | Done, masked: bool, model: Path, tmp_path: Path
) -> None:
    """F15: late ones are trained on, those past the limit are masked, and none is counted twice."""
    batches: list[TrainBatch] = []
    environment = SlowEnvironment(patience, answer, limit_s=1.0)
    run = ToyRun(toy_config(model, tmp_path, NO_FILTER), tmp_path, environment=environment)
    _watch_batches(run, batches.append)
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    waited = [
        s
        for batch in batches
        for group in batch.groups
        for s in group
        if s.trajectory.trajectory_id in environment._asked
    ]
    assert waited
    assert {s.reward.usable for s in waited} == {not masked}


def test_tokens_in_flight_are_those_that_are_there(model: Path, tmp_path: Path) -> None:
    """The balance's last column is a difference; here it is counted out, every turn."""
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    server = run.loop._store
    original = run.loop._backend.poll
    seen: list[int] = []

    def poll(timeout_s: float) -> Any:
        there = sum(generated_tokens(t) for t in server._trajectories.values())
        assert server.balance.in_flight == there + sum(server._training.values())
        seen.append(there)
        return original(timeout_s)

    run.loop._backend.poll = poll  # type: ignore[method-assign]
    assert run.run() == "completed"
    assert max(seen) > 0


# ---------------------------------------------------------------------- pulls that never work


class NeverLoading(FakeEngine):
    """Takes its first weights and no others."""

    def load_weights(self, tensors: Any, version: int, on_pull: Any) -> None:
        if self.version >= 0:
            raise EngineError("broken transfer")
        super().load_weights(tensors, version, on_pull)


def test_instances_that_can_never_pull_again_are_started_anew(model: Path, tmp_path: Path) -> None:
    """F36: nothing can be routed to them once the bound is used up, so the run would go on for ever."""

    def make(instance: str, incarnation: int) -> FakeEngine:
        return (NeverLoading if incarnation == 1 else FakeEngine)(
            sampling=SamplingParams(stop_token_ids=(1,), max_model_len=256),
            seed=0,
            version=-1,
            vocab_size=14,
            kv_capacity_tokens=8192,
            max_running=8,
            lengths=long_tailed(6, 1.0, 24, seed=0),
        )

    run = ToyRun(toy_config(model, tmp_path), tmp_path, make_engine=make)
    original, polls = run.loop._backend.poll, [0]

    def poll(timeout_s: float) -> Any:
        polls[0] += 1
        assert polls[0] < 3000, "no end"
        return original(timeout_s)

    run.loop._backend.poll = poll  # type: ignore[method-assign]
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    events = [row.values for row in run.monitor.take_rows() if row.kind == "event"]
    downs = [str(e["event/text"]) for e in events if e["event/name"] == "instance_down"]
    assert [text.split(" was lost: ")[1].partition(" could")[2] for text in downs] == [
        " not pull for 60 s: broken transfer"
    ] * 2


# ---------------------------------------------------------------------- a stop at every moment


@pytest.mark.parametrize("poll", range(0, 40, 3))
def test_a_stop_at_any_moment_ends_with_a_whole_run_folder(poll: int, model: Path, tmp_path: Path) -> None:
    """F37: at the start, before the first batch, in a step, at a save, during an evaluation."""
    config = toy_config(
        model,
        tmp_path,
        "run.steps=4",
        "checkpoint.every=2",
        "evaluation.every=2",
        "evaluation.prompts=8",
    )
    run = ToyRun(config, tmp_path)
    original = run.loop._backend.poll
    left = [poll]

    def counted(timeout_s: float) -> Any:
        if left[0] == 0:
            run.loop.request_stop()
        left[0] -= 1
        return original(timeout_s)

    run.loop._backend.poll = counted  # type: ignore[method-assign]
    reason = run.run()
    assert reason in ("interrupted", "completed")
    report = audit_ledger(run.ledger)
    assert report.violations == ()
    found = newest_whole(run.checkpoints)
    assert found is not None
    assert found[0] == report.steps
    (summary,) = [row.values for row in run.monitor.take_rows() if row.kind == "summary"]
    assert summary["run/reason"] == reason
    assert summary["tokens/in_flight"] == 0


def test_a_stop_while_the_trainer_never_starts_is_obeyed(model: Path, tmp_path: Path) -> None:
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    polls: list[float] = []

    def poll(timeout_s: float) -> Any:
        polls.append(timeout_s)
        if len(polls) == 2:
            run.loop.request_stop()
        assert len(polls) < 10, "goes on after the stop"
        return []

    run.loop._backend.poll = poll  # type: ignore[method-assign]
    assert run.run() == "interrupted"


def _watch_batches(run: ToyRun, see: Any) -> None:
    original = run.loop._backend.train

    def train(batch: TrainBatch, *, hold: bool) -> None:
        see(batch)
        original(batch, hold=hold)

    run.loop._backend.train = train  # type: ignore[method-assign]
