"""What time was spent on, from hand-made rows: of now, and of before it was recorded step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import STEPS, run_of

from staleflow.reporting.headline import headline
from staleflow.reporting.utilization import idle_share, instance_names, shares, working_seconds


def step(number: int, **seconds: float) -> dict[str, Any]:
    """A row of a step of 10 s with two instances."""
    causes = {f"time/waiting/{c}_s": 0.0 for c in ("rollout", "longest", "reward", "pull", "routing")}
    return {
        "kind": "train",
        "train/step": number,
        "run/seconds": 15.0 + 10 * number,
        "time/step_s": 10.0,
        "time/instances_s": 20.0,
        "time/instances_idle_s": 5.0,
        "time/instances_idle_training_s": 1.0,
        "time/decoding_s": 12.0,
        "time/trainer_waiting_s": 6.0,
        "timing_s/update": 3.0,
        "timing_s/push": 0.5,
        "timing_s/pull": 2.0,
        "timing_s/reward": 4.0,
        "coord/seconds": 0.1,
        **causes,
        "time/waiting/rollout_s": 4.0,
        "time/waiting/longest_s": 2.0,
        **seconds,
    }


def test_shares_by_hand(tmp_path: Path) -> None:
    run = run_of(tmp_path, step(0), step(1))
    found = shares(run)
    assert working_seconds(run) == 20.0
    assert (found.trainer_waiting, found.updating, found.pushing) == (0.6, 0.3, 0.05)
    assert (found.waiting_for["rollout"], found.waiting_for["longest"]) == (0.4, 0.2)
    assert (found.idle, found.idle_while_training) == (0.25, 0.05)
    assert (found.decoding, found.pulling, found.commands) == (0.6, 0.1, None)
    assert found.coordination == pytest.approx(0.01)
    assert found.verifying == 0.4


def test_the_other_commands_are_summed(tmp_path: Path) -> None:
    seconds = {"coord/route_seconds": 0.2, "coord/interrupt_seconds": 0.6, "coord/abort_seconds": 0.2}
    assert shares(run_of(tmp_path, step(0, **seconds))).commands == 0.05


def test_an_instance_that_decoded_between_two_reports_was_not_idle(tmp_path: Path) -> None:
    """Seen from outside idle for 10 of 20 s, but it decoded for 14 s and pulled for 2: 4 s are left."""
    row = step(
        0, **{"time/instances_idle_s": 10.0, "time/instances_idle_training_s": 5.0, "time/decoding_s": 14.0}
    )
    found = shares(run_of(tmp_path, row))
    assert found.idle == pytest.approx(0.2)
    assert found.idle_while_training == pytest.approx(0.1)


def test_waiting_is_summed_over_the_steps_of_all_attempts(tmp_path: Path) -> None:
    """The last attempt's summary row says 2 s; both attempts together waited 8 s of 30 s."""
    first, second = STEPS
    rows = (
        first,
        {**second, "run/seconds": 0.5},
        {"kind": "summary", "run/seconds": 20.0, "wait/trainer_s": 2.0},
    )
    assert shares(run_of(tmp_path, *rows)).trainer_waiting == 8 / 30


def test_without_steps_the_summary_row_says_how_long_the_trainer_waited(tmp_path: Path) -> None:
    summary = {"kind": "summary", "run/seconds": 40.0, "wait/trainer_s": 10.0}
    assert headline(run_of(tmp_path, summary)).shares.trainer_waiting == 0.25


def test_instances_are_named_in_the_order_of_numbers_and_may_join_late(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"kind": "instances", "run/seconds": 0.0, "instance/i2/running": 1, "instance/i10/running": 0},
        {"kind": "instances", "run/seconds": 1.0, "instance/i2/running": 0, "instance/late/running": 5},
    )
    assert instance_names(run) == ["i2", "i10", "late"]
    assert [idle_share(run, name) for name in ("i2", "i10", "late", "absent")] == [0.5, 1.0, 0.0, None]
    assert idle_share(run) == 0.5


def test_samples_tell_idle_time_of_runs_that_did_not_record_it(tmp_path: Path) -> None:
    """Two of four samples are idle, one of them while the trainer worked."""
    samples = [
        {"kind": "instances", "run/seconds": float(t), "trainer/busy": busy, "instance/i0/running": running}
        for t, (busy, running) in enumerate(((1, 0), (0, 0), (1, 3), (0, 4)))
    ]
    found = shares(run_of(tmp_path, *samples, *STEPS))
    assert (found.idle, found.idle_while_training, found.waiting_for) == (0.5, 0.25, {})
