"""The bound where users saw it break: after a resume (F1), and while finished work waits (F2)."""

from __future__ import annotations

from pathlib import Path

from toy import ToyRun, toy_config
from whole_runs import every_poll, instant_rollout, records_of, resume, rows

from staleflow.audit import audit_ledger
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import Trained


def test_staleness_stays_bounded_for_20_steps_after_a_resume_at_version_40(
    model: Path, tmp_path: Path
) -> None:
    """F1: saved at 40, resumed; rollout is instant, the trainer slow; reservations never exceed (η + 1)·B."""
    bound = 2
    settings = (f"staleness.bound={bound}", "checkpoint.every=40")
    first = ToyRun(toy_config(model, tmp_path, *settings, "run.steps=40"), tmp_path)
    first.run()
    config = toy_config(model, tmp_path, *settings, "run.steps=60")
    run = ToyRun(config, tmp_path, start=resume(config, tmp_path))
    instant_rollout(run, train_polls=12)
    buffer = run.loop._control._buffer
    leads: list[int] = []
    every_poll(run, lambda _: leads.append(len(buffer)))
    assert buffer.next_buffer == 40
    assert run.run() == "completed"
    assert bound * config.data.batch_size <= max(leads) <= (bound + 1) * config.data.batch_size
    after = [record for record in records_of(run.ledger, Trained) if record.step >= 40]
    assert [record.step for record in after] == list(range(40, 60))
    lags = [record.step - t.min for record in after for t in record.trajectories]
    assert max(lags) == bound
    assert min(lags) == 0
    report = audit_ledger(run.ledger)
    assert (report.violations, report.attempts) == ((), 2)


def test_finished_groups_that_wait_through_four_versions_of_time_are_still_within_the_bound(
    model: Path, tmp_path: Path
) -> None:
    """F2: instant rollout; from step 3 on the trainer takes four times as long. What waits is counted:
    generation stops at (η + 1)·B groups, and what is consumed afterwards is no older than η."""
    config = toy_config(model, tmp_path, "staleness.bound=1", "run.steps=9")
    run = ToyRun(config, tmp_path)
    instant_rollout(run, train_polls=10)
    control, server, backend = run.loop._control, run.loop._store, run.loop._backend
    generated: list[int] = []

    def look(poll: int) -> None:
        if control.view.next_buffer == 4:  # step 3 is being trained
            if not generated:
                backend._polls_left = 40  # type: ignore[attr-defined]
            generated.append(server.balance.generated)
            assert len(control._buffer) <= 2 * config.data.batch_size

    every_poll(run, look)
    assert run.run() == "completed"
    assert len(generated) > 30
    assert len(set(generated[-20:])) == 1, "nothing is generated that could only become too old"
    report = audit_ledger(run.ledger)
    assert report.violations == ()
    assert report.max_staleness == 1
    assert control.view.count(TrajectoryState.RUNNING) == 0


def test_the_age_of_finished_groups_is_reported(model: Path, tmp_path: Path) -> None:
    """F2: when a step has been pushed, all that waits for training was finished under older weights."""
    run = ToyRun(toy_config(model, tmp_path, "staleness.bound=1", "run.steps=8"), tmp_path)
    instant_rollout(run, train_polls=10)
    run.run()
    steady = rows(run, "train")[2:-1]
    assert [row["staleness/in_queue/max"] for row in steady] == [1] * len(steady)
    assert [row["staleness/in_queue/mean"] for row in steady] == [1.0] * len(steady)
