"""Whole runs in one process: the real control, servers, engine, rewards and trainer, on a virtual clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy import ToyRun, any_third, opening, toy_config

from staleflow.audit import audit_ledger
from staleflow.config.schema import Config
from staleflow.data.environment import ScriptedTurns
from staleflow.data.schedule import PromptSchedule
from staleflow.data.trajectory import Reward, ScoredTrajectory, TrainBatch, Trajectory
from staleflow.errors import RunFailed
from staleflow.protocol.records import Consume, Trained
from staleflow.rollout.engine import Engine, SamplingParams
from staleflow.rollout.fake import FakeEngine, FakeScript
from staleflow.rollout.scripted_lengths import long_tailed
from staleflow.runtime.assembly import build_engine, build_trainer, read_data, scoring_request
from staleflow.runtime.start import first_start, resumed_start
from staleflow.storage.ledger import read_ledger
from staleflow.training.checkpoints import newest_whole
from staleflow.training.filtering import is_uninformative
from staleflow.training.trainer import TrainResult


def no_time(seconds: float) -> None:
    """The fake engine's time."""


def trained_records(path: Path) -> list[Trained]:
    return [record for _, _, record in read_ledger(path) if isinstance(record, Trained)]


def prompt_uses(path: Path) -> Counter[str]:
    """How often each `e<epoch>-p<prompt>` was consumed, voided consumes left out."""
    batches: dict[int, list[str]] = {}
    for _, _, record in read_ledger(path):
        if isinstance(record, Consume):
            batches[record.buffer] = [g.group.rpartition("-a")[0] for g in record.groups]
    return Counter(use for batch in batches.values() for use in batch)


def train_rows(run: ToyRun) -> list[dict[str, Any]]:
    return [row.values for row in run.monitor.take_rows() if row.kind == "train"]


# ---------------------------------------------------------------------- bound 0 is synchronous training


def synchronous_reference(config: Config) -> tuple[list[TrainResult], dict[str, NDArray[Any]]]:
    """A plain loop: draw, generate to the end, score, filter, train; one prompt after the other."""
    data = read_data(config)
    trainer = build_trainer(config, first_start(opening(config)))
    request = scoring_request(data.tokenizer)
    prompts = iter(PromptSchedule(len(data.train), seed=config.run.seed, shuffle=config.data.shuffle))
    results = []
    for step in range(config.run.steps):
        engine = build_engine(config, data.tokenizer, spend=no_time)
        engine.load_weights({}, step, "recompute")
        groups: list[tuple[ScoredTrajectory, ...]] = []
        while len(groups) < config.data.batch_size:
            epoch, index = next(prompts)
            group = f"e{epoch}-p{index}-a0"
            scored = []
            for member in range(config.data.group_size):
                engine.add(
                    Trajectory(
                        trajectory_id=f"{group}-m{member}",
                        group_id=group,
                        member=member,
                        prompt=data.train.prompt(index),
                        max_new_tokens=config.rollout.max_new_tokens,
                    )
                )
                (finished,) = _until_finished(engine)
                reward = Reward(raw=any_third(request(finished)))
                scored.append(ScoredTrajectory(trajectory=finished, reward=reward))
            if not is_uninformative([s.reward.raw for s in scored]):
                groups.append(tuple(scored))
        results.append(trainer.train(TrainBatch(step=step, groups=tuple(groups))))
    return results, {name: np.array(value) for name, value in trainer.weights().items()}


def _until_finished(engine: Engine) -> list[Trajectory]:
    while True:
        finished = list(engine.step())
        if finished:
            return finished


def test_bound_zero_is_a_plain_synchronous_loop_to_the_bit(model: Path, tmp_path: Path) -> None:
    """F5: same ids, same order, same tokens, same loss, same weights."""
    config = toy_config(model, tmp_path, "staleness.bound=0", "checkpoint.every=0")
    expected, weights = synchronous_reference(config)
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    records = trained_records(run.ledger)
    assert [[t.id for t in record.trajectories] for record in records] == [
        [t.trajectory_id for t in result.trained] for result in expected
    ]
    assert [[t.hash for t in record.trajectories] for record in records] == [
        [t.token_hash for t in result.trained] for result in expected
    ]
    assert [row["train/loss"] for row in train_rows(run)] == [r.metrics["train/loss"] for r in expected]
    found = newest_whole(run.checkpoints)
    assert found is not None
    trainer = build_trainer(config, first_start(opening(config)))
    trainer.load(found[1])
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_the_reference_trains_at_all(model: Path, tmp_path: Path) -> None:
    """The comparison above would be empty if weights never moved."""
    config = toy_config(model, tmp_path, "staleness.bound=0")
    fresh = build_trainer(config, first_start(opening(config)))
    before = {name: np.array(value) for name, value in fresh.weights().items()}
    _, after = synchronous_reference(config)
    assert any(not np.array_equal(before[name], after[name]) for name in before)


# ---------------------------------------------------------------------- the bound


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_the_bound_is_reached_and_never_exceeded(bound: int, model: Path, tmp_path: Path) -> None:
    """F2, F3, F4: instant rollout, a trainer that takes eight polls, and every bound."""
    config = toy_config(model, tmp_path, f"staleness.bound={bound}", "run.steps=8")
    run = ToyRun(config, tmp_path)
    assert run.run() == "completed"
    report = audit_ledger(run.ledger)
    assert report.violations == ()
    assert report.max_staleness == bound
    if bound == 0:
        for record in trained_records(run.ledger):
            assert {(t.min, t.max) for t in record.trajectories} == {(record.step, record.step)}
    assert max(row["staleness/max"] for row in train_rows(run)) == bound


def test_the_same_config_gives_the_same_ledger(model: Path, tmp_path: Path) -> None:
    """F33: a run is a function of its config."""
    ledgers = []
    for name in ("a", "b"):
        run = ToyRun(toy_config(model, tmp_path), tmp_path / name)
        run.run()
        ledgers.append(run.ledger.read_bytes())
    assert ledgers[0] == ledgers[1]
    other = ToyRun(toy_config(model, tmp_path, "run.seed=1"), tmp_path / "c")
    other.run()
    assert other.ledger.read_bytes() != ledgers[0]


def test_tokens_are_conserved_in_every_row(model: Path, tmp_path: Path) -> None:
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    run.run()
    rows = [row.values for row in run.monitor.take_rows() if row.kind in ("train", "summary")]
    assert len(rows) == 7
    for values in rows:
        parts = ("trained", "filtered", "aborted", "discarded", "in_flight")
        assert values["tokens/generated"] == sum(int(values[f"tokens/{part}"]) for part in parts)
    assert rows[-1]["tokens/in_flight"] == 0
    assert int(rows[-1]["tokens/trained"]) > 0


def test_every_stated_metric_is_in_every_row(model: Path, tmp_path: Path) -> None:
    """F30: no metric of a step is logged only sometimes."""
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    run.run()
    rows = train_rows(run)
    assert {frozenset(row) for row in rows} == {frozenset(rows[0])}
    stated = {
        "train/step",
        "run/seconds",
        *(f"staleness/{k}" for k in ("mean", "max", "min", "violations", "in_flight/mean", "in_queue/max")),
        *(f"buffer/{o}/{k}" for o in (0, 1) for k in ("reserved", "occupied")),
        *(f"rollout/{k}" for k in ("reward_mean", "response_len_mean", "truncated_ratio", "partial_ratio")),
        *(f"rollout/{k}" for k in ("tokens_per_s", "wasted_tokens")),
        *(f"coord/{k}_count" for k in ("route", "interrupt", "abort", "pull")),
        *(f"reward/{k}" for k in ("timeout_count", "error_count")),
        *(f"train/{k}" for k in ("loss", "grad_norm", "kl", "entropy", "clip_frac", "logprob_abs_diff")),
        *(f"timing_s/{k}" for k in ("wait_for_batch", "update", "push", "pull", "reward")),
    }
    assert stated - set(rows[0]) == set()


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize(("policy", "uses"), [("train", 14), ("drop", 12), ("pad", 15)])
def test_epochs_end_with_the_stated_last_batch(policy: str, uses: int, model: Path, tmp_path: Path) -> None:
    """F17, F23: 7 prompts, 2 epochs, batches of 3."""
    config = toy_config(
        model,
        tmp_path,
        "data.size=7",
        "data.epochs=2",
        "run.steps=50",
        f"data.last_batch={policy}",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path)
    assert run.run() == "exhausted"
    assert audit_ledger(run.ledger).violations == ()
    counts = prompt_uses(run.ledger)
    assert sum(counts.values()) == uses
    assert set(counts.values()) == {1}
    if policy == "train":
        assert set(counts) == {f"e{e}-p{p}" for e in range(2) for p in range(7)}


def test_a_run_that_only_filters_ends_and_says_so(model: Path, tmp_path: Path) -> None:
    """F26: all rewards equal; nothing is trained, nothing is NaN, nothing goes on for ever."""
    config = toy_config(model, tmp_path, "reward.verifier=toy.always_one", "data.max_filtered_batches=2")
    run = ToyRun(config, tmp_path)
    assert run.run() == "filtered_out"
    assert trained_records(run.ledger) == []


def test_a_stop_request_finishes_the_step_and_saves_it(model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path, "run.steps=1000", "checkpoint.every=0")
    run = ToyRun(config, tmp_path)
    handed_over: list[int] = []
    original = run.loop._backend.train

    def train(batch: TrainBatch, *, hold: bool) -> None:
        handed_over.append(batch.step)
        if batch.step == 3:
            run.loop.request_stop()
        original(batch, hold=hold)

    run.loop._backend.train = train  # type: ignore[method-assign]
    assert run.run() == "interrupted"
    assert handed_over == [0, 1, 2, 3]
    found = newest_whole(run.checkpoints)
    assert found is not None
    assert found[0] == 4
    assert audit_ledger(run.ledger).violations == ()


# ---------------------------------------------------------------------- failures

IMPATIENT = (
    "rollout.lost_after_s=2",
    "rollout.progress_interval_s=0.5",
    "training.dynamic_sampling=false",
)


class EngineMaker:
    """Fake engines with a script for the first incarnation of one instance."""

    def __init__(self, script: FakeScript, *, incarnations: int = 1, instance: str | None = "i0") -> None:
        self.script = script
        self.incarnations = incarnations
        self.instance = instance
        self.made: list[tuple[str, int]] = []

    def __call__(self, instance: str, incarnation: int) -> Engine:
        self.made.append((instance, incarnation))
        scripted = self.instance in (None, instance) and incarnation <= self.incarnations
        return FakeEngine(
            sampling=SamplingParams(stop_token_ids=(1,), max_model_len=256),
            seed=0,
            version=-1,
            vocab_size=14,
            kv_capacity_tokens=8192,
            max_running=8,
            lengths=long_tailed(6, 1.0, 24, seed=0),
            script=self.script if scripted else FakeScript(),
        )


def test_an_engine_that_dies_gives_its_work_back_and_is_started_again(model: Path, tmp_path: Path) -> None:
    """F16: an exception in rollout neither hangs the run nor loses a group."""
    maker = EngineMaker(FakeScript(fail_at_step=9))
    run = ToyRun(toy_config(model, tmp_path), tmp_path, make_engine=maker)
    assert run.run() == "completed"
    assert maker.made == [("i0", 1), ("i1", 1), ("i0", 2)]
    events = [r.values["event/name"] for r in run.monitor.take_rows() if r.kind == "event"]
    assert "instance_down" in events
    assert audit_ledger(run.ledger).violations == ()


def test_a_lost_result_is_generated_again(model: Path, tmp_path: Path) -> None:
    """F15: two trajectories vanish without a word; both are trained in the end."""
    first = read_data(toy_config(model, tmp_path)).train
    index = next(iter(PromptSchedule(len(first), seed=0)))[1]
    lost = frozenset({f"e0-p{index}-a0-m0", f"e0-p{index}-a0-m2"})
    maker = EngineMaker(FakeScript(lose=lost), instance=None)
    config = toy_config(model, tmp_path, *IMPATIENT)
    run = ToyRun(config, tmp_path, make_engine=maker)
    assert run.run() == "completed"
    trained = {t.id: t.tokens for record in trained_records(run.ledger) for t in record.trajectories}
    assert all(trained[trajectory_id] > 0 for trajectory_id in lost)


def test_a_trajectory_that_never_moves_is_masked_after_its_retries(model: Path, tmp_path: Path) -> None:
    """F15, F25: never a silent zero, never a hang."""
    data = read_data(toy_config(model, tmp_path)).train
    index = next(iter(PromptSchedule(len(data), seed=0)))[1]
    victim = f"e0-p{index}-a0-m1"
    maker = EngineMaker(FakeScript(freeze=frozenset({victim})), instance=None)
    config = toy_config(model, tmp_path, *IMPATIENT)
    run = ToyRun(config, tmp_path, make_engine=maker)
    assert run.run() == "completed"
    rows = run.monitor.take_rows()
    told = [r.values["event/text"] for r in rows if r.values.get("event/name") == "gave_up"]
    assert len(told) == 1
    assert victim in str(told[0])
    assert "no new token for 2 s" in str(told[0])
    trained = {t.id: t.tokens for record in trained_records(run.ledger) for t in record.trajectories}
    assert trained[victim] == 0


def test_a_run_whose_every_instance_keeps_dying_fails_with_the_reason(model: Path, tmp_path: Path) -> None:
    maker = EngineMaker(FakeScript(fail_at_step=1), incarnations=100, instance=None)
    run = ToyRun(toy_config(model, tmp_path), tmp_path, make_engine=maker)
    with pytest.raises(RunFailed, match="every rollout instance failed: scripted failure at step 1"):
        run.run()


def test_a_pull_that_fails_leaves_the_old_version_at_work(model: Path, tmp_path: Path) -> None:
    """F36: the next cycle pulls again; nothing old comes under a new reservation."""
    maker = EngineMaker(FakeScript(refuse_loads=0))

    class Refusing(FakeEngine):
        refused = 0

        def load_weights(self, tensors: Any, version: int, on_pull: Any) -> None:
            if version == 2 and Refusing.refused < 3:
                Refusing.refused += 1
                from staleflow.errors import EngineError

                raise EngineError("broken transfer")
            super().load_weights(tensors, version, on_pull)

    def make(instance: str, incarnation: int) -> Engine:
        engine = maker(instance, incarnation)
        if instance == "i0":
            engine.__class__ = Refusing
        return engine

    eager = toy_config(model, tmp_path, "coordination.synchronization.strategy=naive")
    run = ToyRun(eager, tmp_path, make_engine=make)
    assert run.run() == "completed"
    assert Refusing.refused == 3
    report = audit_ledger(run.ledger)
    assert report.violations == ()
    assert report.max_staleness == 1


# ---------------------------------------------------------------------- several turns


def test_two_turns_train_on_generated_tokens_only(model: Path, tmp_path: Path) -> None:
    """F8, F14: what the environment gave is kept as ids and masked; arrays stay aligned."""
    seen: list[TrainBatch] = []
    config = toy_config(model, tmp_path, "run.steps=3", "rollout.fake.lengths.max=8")
    run = ToyRun(config, tmp_path, environment=ScriptedTurns([[5, 6, 7]]))
    original = run.loop._backend.train

    def train(batch: TrainBatch, *, hold: bool) -> None:
        seen.append(batch)
        original(batch, hold=hold)

    run.loop._backend.train = train  # type: ignore[method-assign]
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    trajectories = [s.trajectory for batch in seen for group in batch.groups for s in group]
    given = [t for t in trajectories if len(t.segments) == 3]
    assert len(given) > len(trajectories) / 2
    for t in given:
        assert t.segments[1].tokens.tolist() == [5, 6, 7]
        assert len(t.tokens) == len(t.log_probs) == len(t.versions) == len(t.loss_mask)
        assert t.response_len <= config.rollout.max_new_tokens
        assert int(t.loss_mask.sum()) == t.response_len - 3


# ---------------------------------------------------------------------- resume


class Killed(Exception):
    """Stands for kill -9 at a poll."""


@pytest.mark.parametrize("bound", [0, 2])
def test_no_prompt_is_skipped_or_trained_twice_over_kills_and_resumes(
    bound: int, model: Path, tmp_path: Path
) -> None:
    """F1, F19, F20, F21: killed at five moments, resumed each time; every use exactly once, bound kept."""
    config = toy_config(
        model,
        tmp_path,
        f"staleness.bound={bound}",
        "data.size=20",
        "data.epochs=2",
        "run.steps=50",
        "checkpoint.every=2",
        "training.dynamic_sampling=false",
    )
    start = first_start(opening(config))
    reasons: list[str] = []
    for polls in (5, 21, 37, 29, 40, None):
        run = ToyRun(config, tmp_path, start=start)
        if polls is not None:
            _kill_after(run, polls)
        try:
            reasons.append(run.run())
        except Killed:
            start = resumed_start(opening(config), run.ledger, run.checkpoints)
    assert reasons == ["exhausted"]
    assert set(prompt_uses(tmp_path / "ledger.jsonl").items()) == {
        (f"e{e}-p{p}", 1) for e in range(2) for p in range(20)
    }
    report = audit_ledger(tmp_path / "ledger.jsonl")
    assert report.violations == ()
    assert report.max_staleness == bound
    assert report.attempts == 6


def _kill_after(run: ToyRun, polls: int) -> None:
    original = run.loop._backend.poll
    left = [polls]

    def poll(timeout_s: float) -> Any:
        left[0] -= 1
        if left[0] < 0:
            run.loop._ledger._file.flush()
            raise Killed
        return original(timeout_s)

    run.loop._backend.poll = poll  # type: ignore[method-assign]


def test_resuming_goes_on_from_the_saved_weights(model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path, "run.steps=4", "checkpoint.every=4")
    run = ToyRun(config, tmp_path)
    run.run()
    start = resumed_start(opening(config), run.ledger, run.checkpoints)
    assert (start.step, start.attempt, start.group_attempt) == (4, 1, 1)
    trainer = build_trainer(config, start)
    assert trainer.version == 4
