"""F37 and F16 for a trainer of two ranks on Ray: a killed rank fails the run, nothing is left, it resumes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from test_ray_run import Command

from staleflow.audit import audit_ledger
from staleflow.training.checkpoints import newest_whole

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.timeout(300)


def test_a_killed_rank_fails_the_run_clearly_and_the_run_goes_on_with_another_number_of_ranks(
    model: Path, tmp_path: Path
) -> None:
    deepspeed = ("training.trainer=deepspeed", "run.steps=4", "checkpoint.every=1")
    first = Command(
        model,
        tmp_path,
        *deepspeed,
        "run.steps=400",
        "training.deepspeed.ranks=2",
        "training.deepspeed.zero_stage=3",
    )
    try:
        first.wait_for(lambda: len(first.rows("train")) > 1, 200, "step 1")
        first.actor("RankActor").send_signal(signal.SIGKILL)
        assert first.end() == 1
    finally:
        kill(first)
    assert re.search(r"training rank 1 died|rank 1", first.output.read_text())
    first.assert_nothing_left()
    found = newest_whole(first.folder / "checkpoints")
    assert found is not None
    steps = found[0] + 1
    second = Command(
        model, tmp_path, *deepspeed, f"run.steps={steps}", "training.deepspeed.zero_stage=2", "--resume"
    )
    try:
        second.wait_for(lambda: second.process.poll() is not None or second.rows("summary"), 200, "the end")
        assert second.end() == 0, second.output.read_text()
    finally:
        kill(second)
    assert audit_ledger(second.folder / "ledger.jsonl").violations == ()
    second.assert_nothing_left()


def kill(command: Command) -> None:
    """Whatever is left of a test that failed."""
    for pid in {*command.family, command.process.pid}:
        if psutil.pid_exists(pid) and command.process.poll() is None:
            psutil.Process(pid).kill()
