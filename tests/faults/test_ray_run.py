"""The real thing: `staleflow run` on Ray, with its processes killed and interrupted for real.

One start of a local cluster takes ten seconds and more, so each test does several things to its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from staleflow.audit import audit_ledger
from staleflow.training.checkpoints import newest_whole

HERE = Path(__file__).parent
RUNTIME_TESTS = HERE.parent / "runtime"
sys.path.insert(0, str(RUNTIME_TESTS))

from toy import make_model_folder  # noqa: E402

START_LIMIT_S = 90
END_LIMIT_S = 60

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("ray") / "model")


class Command:
    """A `staleflow run` under way, in a session of its own as a terminal's job is."""

    def __init__(self, model: Path, folder: Path, *arguments: str) -> None:
        self.folder = folder / "ray"
        self.shared = folder / "shm"
        self.shared.mkdir(exist_ok=True)
        self.output = folder / "output.txt"
        settings = [
            f"model.source={model}",
            f"run.output_dir={folder}",
            f"cluster.shared_memory_dir={self.shared}",
            "run.name=ray",
            "data.size=64",
            "data.batch_size=3",
            "data.group_size=3",
            "rollout.engine=fake",
            "rollout.fake.lengths.kind=uniform",
            "rollout.fake.lengths.max=24",
            "rollout.fake.seconds_per_step=0.02",
            "rollout.max_new_tokens=24",
            "rollout.max_running=8",
            "reward.verifier=toy.any_third",
            "evaluation.every=0",
            "checkpoint.every=2",
            "telemetry.console=plain",
            "telemetry.wandb.mode=disabled",
        ]
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "staleflow.cli", "run", *settings, *arguments],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join([str(RUNTIME_TESTS), str(HERE), os.getcwd()])},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.family: set[int] = set()

    def descendants(self) -> list[psutil.Process]:
        """Every process of the run that is alive now; remembers those ever seen."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self.family |= {p.pid for p in found}
        return found

    def actor(self, name: str) -> psutil.Process:
        """The process of an actor, by its class's name."""
        for process in self.descendants():
            try:
                if f"ray::{name}" in " ".join(process.cmdline()):
                    return process
            except psutil.NoSuchProcess:
                continue
        raise AssertionError(f"no process of {name}")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["kind"] == kind]

    def wait_for(self, what: Callable[[], object], limit_s: float, name: str) -> None:
        deadline = time.monotonic() + limit_s
        while not what():
            self.descendants()
            assert self.process.poll() is None, f"the run ended before {name}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {name} in {limit_s} s:\n{self.output.read_text()}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.rows("train")) > step, START_LIMIT_S, f"step {step}")

    def end(self) -> int:
        """Wait for the exit code."""
        deadline = time.monotonic() + END_LIMIT_S
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, f"the run did not end:\n{self.output.read_text()}"
            time.sleep(0.1)
        return self.process.returncode

    def assert_nothing_left(self) -> None:
        """No process of the run is alive, and its shared memory is gone."""
        deadline = time.monotonic() + 10
        while True:
            left = [p for p in self.family if psutil.pid_exists(p) and _alive(p)]
            if not left:
                break
            assert time.monotonic() < deadline, [(" ".join(psutil.Process(p).cmdline())) for p in left]
            time.sleep(0.1)
        assert [p.name for p in self.shared.iterdir() if not p.name.startswith(".")] == []


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def begin(*arguments: str) -> Command:
        started.append(Command(model, tmp_path, *arguments))
        return started[-1]

    yield begin
    for command in started:
        for process in [*command.descendants(), command.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        command.process.wait(10)


def test_a_rollout_process_killed_twice_costs_no_group_and_no_bound(start: Callable[..., Command]) -> None:
    """F16, F37: kill -9 of rollout processes; the run completes, the audit is clean, nothing is left."""
    command = start("run.steps=14")
    command.wait_for_step(1)
    command.actor("RolloutActor").send_signal(signal.SIGKILL)
    command.wait_for_step(4)
    command.actor("RolloutActor").send_signal(signal.SIGKILL)
    assert command.end() == 0, command.output.read_text()
    downs = [r for r in command.rows("event") if r["event/name"] == "instance_down"]
    assert len(downs) == 2
    report = audit_ledger(command.folder)
    assert report.violations == ()
    assert report.steps == 14
    assert report.max_staleness == 1
    assert (command.folder / "report.html").stat().st_size > 10_000
    command.assert_nothing_left()


def test_ctrl_c_once_saves_and_reports_and_resume_goes_on(start: Callable[..., Command]) -> None:
    """F1, F37: SIGINT to the whole foreground group, as a terminal sends it; then --resume."""
    command = start("run.steps=500", "checkpoint.every=0")
    command.wait_for_step(2)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130, command.output.read_text()
    command.assert_nothing_left()
    found = newest_whole(command.folder / "checkpoints")
    assert found is not None
    steps = found[0]
    assert steps == len(command.rows("train"))
    assert (command.folder / "report.html").exists()
    assert audit_ledger(command.folder).violations == ()

    again = start(f"run.steps={steps + 4}", "--resume")
    assert again.end() == 0, again.output.read_text()
    report = audit_ledger(again.folder)
    assert report.violations == ()
    assert report.steps == steps + 4
    assert report.max_staleness == 1


def test_ctrl_c_twice_stops_now_and_leaves_nothing(start: Callable[..., Command]) -> None:
    """F37: also in the middle of the start."""
    command = start("run.steps=500")
    command.wait_for(lambda: len(command.descendants()) > 5, START_LIMIT_S, "processes")
    os.killpg(command.process.pid, signal.SIGINT)
    time.sleep(0.5)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130, command.output.read_text()
    command.assert_nothing_left()


def test_kill_9_of_everything_loses_no_prompt(start: Callable[..., Command]) -> None:
    """F19: the command and all its processes die at once; the resumed run uses every prompt exactly once."""
    settings = ("data.size=12", "data.epochs=2", "run.steps=50", "training.dynamic_sampling=false")
    command = start(*settings)
    command.wait_for_step(3)
    for process in [psutil.Process(command.process.pid), *command.descendants()]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    command.process.wait(20)
    again = start(*settings, "--resume")
    assert again.end() == 0, again.output.read_text()
    report = audit_ledger(again.folder)
    assert report.violations == ()
    assert report.attempts == 2
    assert report.trained_groups == 24
    again.assert_nothing_left()


def test_ctrl_c_in_the_middle_of_a_save_leaves_a_whole_checkpoint(start: Callable[..., Command]) -> None:
    """F37: the save of step 1 takes two seconds and SIGINT comes while it is half done."""
    command = start(
        "run.steps=500", "checkpoint.every=1", "training.trainer=faulty_parts.slowly_saving_trainer"
    )
    checkpoints = command.folder / "checkpoints"
    command.wait_for(lambda: list(checkpoints.glob("*/begun")), START_LIMIT_S, "save")
    assert newest_whole(checkpoints) is None
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.end() == 130, command.output.read_text()
    command.assert_nothing_left()
    found = newest_whole(checkpoints)
    assert found is not None
    assert found[0] == len(command.rows("train"))
    assert (command.folder / "report.html").exists()
    report = audit_ledger(command.folder)
    assert (report.violations, report.steps) == ((), found[0])


def test_an_evaluation_that_dies_costs_its_version_and_not_the_run(start: Callable[..., Command]) -> None:
    """F16: its process is killed; another takes the next versions, and the last one is evaluated."""
    command = start("evaluation.every=1", "evaluation.prompts=4", "run.steps=12", "data.size=256")
    command.wait_for(lambda: command.rows("eval"), START_LIMIT_S, "the first evaluation")
    command.actor("EvaluatorActor").kill()
    assert command.end() == 0, command.output.read_text()
    failed = [r for r in command.rows("event") if r["event/name"] == "evaluation_failed"]
    assert len(failed) == 1
    assert command.rows("eval")[-1]["eval/weight_version"] == 12
    assert audit_ledger(command.folder).violations == ()
    command.assert_nothing_left()
