"""Exceptions in any part end in a retry or in a failure that is told, never in a run that stands still (F16),
lost results are asked for again in stated time (F15), and a stop is heeded at any moment (F37)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from toy import ToyRun, toy_config
from typer.testing import CliRunner
from whole_runs import WatchedEngine, every_poll, records_of, rows, watched_engines

from staleflow.audit import audit_ledger
from staleflow.cli.main import app
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.protocol.records import End, Trained
from staleflow.rollout.engine import Engine
from staleflow.rollout.fake import FakeEngine, FakeScript
from staleflow.training.checkpoints import newest_whole

POLLS = 3000
"""Many times what such a run takes: one that stands still fails here instead of at the time limit."""


def must_end(run: ToyRun) -> None:
    def look(poll: int) -> None:
        assert poll < POLLS, "the run stands still"

    every_poll(run, look)


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_one_rollout_that_always_raises_costs_a_member_and_not_the_run(
    error: type[Exception], model: Path, tmp_path: Path
) -> None:
    """F16: member 1 of the third group kills every engine that decodes it. After its retries it is masked;
    the run completes, and says what happened."""
    config = toy_config(
        model, tmp_path, "data.shuffle=false", "training.dynamic_sampling=false", "rollout.max_retries=1"
    )
    victim = "e0-p2-a0-m1"

    class Poisoned(WatchedEngine):
        def step(self) -> Sequence[Trajectory]:
            if victim in self.trajectories():
                raise error("poison")
            return super().step()

    make_engine, _ = watched_engines(config)

    def make(instance: str, incarnation: int) -> Engine:
        engine: FakeEngine = make_engine(instance, incarnation)
        engine.__class__ = Poisoned
        return engine

    run = ToyRun(config, tmp_path, make_engine=make)
    must_end(run)
    assert run.run() == "completed"
    events = rows(run, "event")
    told = [str(row["event/text"]) for row in events if row["event/name"] == "gave_up"]
    assert any(victim in text and "poison" in text for text in told)
    tokens = {t.id: t.tokens for r in records_of(run.ledger, Trained) for t in r.trajectories}
    assert tokens[victim] == 0
    assert audit_ledger(run.ledger).violations == ()


def test_an_exception_in_the_trainer_ends_the_run(model: Path, tmp_path: Path) -> None:
    """F16: it comes out of the run as it is, and engines are closed."""
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    must_end(run)
    trainer = run.loop._backend._trainer  # type: ignore[attr-defined]

    def train(batch: TrainBatch, before_update: Callable[[], None]) -> None:
        raise ZeroDivisionError("in the trainer")

    trainer.train = train
    with pytest.raises(ZeroDivisionError, match="in the trainer"):
        run.run()
    assert run.loop._backend._engines == {}  # type: ignore[attr-defined]


def test_a_run_whose_engines_die_exits_with_1_and_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F16, by the command: exit code not 0, one sentence, and what there is in the report."""
    monkeypatch.chdir(tmp_path)
    config = toy_config(model, tmp_path, "rollout.engine=faulty_parts.dying_engine")
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    result = CliRunner().invoke(app, ["run", "c.yaml"])
    assert result.exit_code == 1
    assert "staleflow: the run failed: every rollout instance failed: scripted failure" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_swallowed_result_is_asked_for_again_within_the_stated_time(model: Path, tmp_path: Path) -> None:
    """F15: one trajectory vanishes in the engine. It is routed again `lost_after_s` later, not earlier, and
    until then the rest of the run is not disturbed."""
    lost = "e0-p2-a0-m1"
    config = toy_config(
        model,
        tmp_path,
        "data.shuffle=false",
        "training.dynamic_sampling=false",
        "rollout.lost_after_s=2",
        "rollout.progress_interval_s=0.5",
    )
    make_engine, asked = watched_engines(config, script=FakeScript(lose=frozenset({lost})))
    run = ToyRun(config, tmp_path, make_engine=make_engine)
    must_end(run)
    clock = run.loop._clock
    times: dict[int, float] = {}
    every_poll(
        run, lambda _: times.setdefault(len([t for _, t in asked if t.trajectory_id == lost]), clock.now())
    )
    assert run.run() == "completed"
    attempts = sorted(times)[1:]
    assert len(attempts) >= 2
    gaps = [times[b] - times[a] for a, b in pairwise(attempts)]
    assert all(2.0 <= gap <= 2.5 for gap in gaps), gaps
    tokens = {t.id: t.tokens for r in records_of(run.ledger, Trained) for t in r.trajectories}
    assert tokens[lost] > 0


def test_a_stop_before_the_first_part_is_up_ends_the_run(model: Path, tmp_path: Path) -> None:
    """F37: Ctrl-C during the start. Nothing is trained, and the ledger says why it ended."""
    run = ToyRun(toy_config(model, tmp_path), tmp_path)
    must_end(run)
    run.loop.request_stop()
    assert run.run() == "interrupted"
    assert records_of(run.ledger, Trained) == []
    assert records_of(run.ledger, End) == [End(steps=0, reason="interrupted")]
    assert rows(run, "summary")[-1]["run/reason"] == "interrupted"


def test_a_stop_during_a_save_ends_with_a_whole_checkpoint_of_the_last_step(
    model: Path, tmp_path: Path
) -> None:
    """F37: asked to stop while the checkpoint of step 2 is being written."""
    run = ToyRun(toy_config(model, tmp_path, "run.steps=50", "checkpoint.every=2"), tmp_path)
    must_end(run)
    trainer = run.loop._backend._trainer  # type: ignore[attr-defined]
    save = trainer.save

    def stop_and_save(folder: Path) -> None:
        run.loop.request_stop()
        save(folder)

    trainer.save = stop_and_save
    assert run.run() == "interrupted"
    found = newest_whole(run.checkpoints)
    assert found is not None
    assert 2 <= found[0] == len(rows(run, "train")) == len(records_of(run.ledger, Trained))
    assert audit_ledger(run.ledger).violations == ()
