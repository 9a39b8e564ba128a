"""F37 and F16 for a trainer of two ranks on Ray: a killed rank fails the run, and nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from test_ray_run import Command

from staleflow.training.checkpoints import newest_whole

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.timeout(300)
START_LIMIT_S = 240
"""Each rank imports torch and DeepSpeed, and all of them start at once."""


def test_a_killed_rank_fails_the_run_by_name_and_leaves_a_checkpoint_and_no_process(
    model: Path, tmp_path: Path
) -> None:
    run = Command(
        model,
        tmp_path,
        "training.trainer=deepspeed",
        "training.deepspeed.ranks=2",
        "training.deepspeed.zero_stage=3",
        "run.steps=400",
        "checkpoint.every=1",
    )
    try:
        run.wait_for(lambda: len(run.rows("train")) > 1, START_LIMIT_S, "step 1")
        run.actor("RankActor").send_signal(signal.SIGKILL)
        assert run.end() == 1
    finally:
        kill(run)
    assert "the process of training rank 1 died" in run.output.read_text()
    run.assert_nothing_left()
    assert newest_whole(run.folder / "checkpoints") is not None


def kill(run: Command) -> None:
    """Whatever is left of a test that failed."""
    if run.process.poll() is None:
        for pid in {*run.family, run.process.pid}:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
