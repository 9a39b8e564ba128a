"""A sweep runs each combination once, survives failures, and compares what there is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.cli.sweep import SweepPlan, is_done, plan_sweep, run_sweep
from staleflow.config import load_config
from staleflow.errors import ConfigError, RunFolderError, UserError
from staleflow.protocol.records import End, Start
from staleflow.storage import LedgerWriter

START = Start(bound=1, batch_size=1, group_size=1, last_batch="train", spare_limit=0)


def ledger(folder: Path, *records: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with LedgerWriter(folder / "ledger.jsonl") as writer:
        for seq, record in enumerate(records):
            writer.append(record, seq, 0)


def plan(folder: Path, *axes: str, arguments: tuple[str, ...] = ()) -> SweepPlan:
    return plan_sweep(list(arguments), list(axes), name="s", output_dir=str(folder), environ={})


def test_every_combination_is_a_run_of_its_own(tmp_path: Path) -> None:
    axes = ("staleness.bound=0,1", "training.betas=[0.9, 0.95],[0.8, 0.9]", "rollout.on_pull=keep_kv")
    made = plan(tmp_path, *axes, arguments=("run.steps=3",))
    assert [run.label for run in made.runs] == [
        "eta=0,betas=_0.9_0.95_,on_pull=keep_kv",
        "eta=0,betas=_0.8_0.9_,on_pull=keep_kv",
        "eta=1,betas=_0.9_0.95_,on_pull=keep_kv",
        "eta=1,betas=_0.8_0.9_,on_pull=keep_kv",
    ]
    first = made.runs[0]
    assert first.folder == tmp_path / "s" / first.label
    assert first.arguments[:1] == ("run.steps=3",)
    assert {"staleness.bound=0", "training.betas=[0.9, 0.95]", "rollout.on_pull=keep_kv"} < set(
        first.arguments
    )


def test_seeds_are_the_last_axis_of_every_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SweepPlan] = []
    monkeypatch.setattr("staleflow.cli.sweep.run_sweep", lambda plan, *, resume: made.append(plan) or 0)
    arguments = ["sweep", "--seeds", "0,1", "--axis", "coordination.policy=sync,staleflow"]
    result = CliRunner().invoke(app, [*arguments, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert [run.label for run in made[0].runs] == [
        "policy=sync,seed=0",
        "policy=sync,seed=1",
        "policy=staleflow,seed=0",
        "policy=staleflow,seed=1",
    ]


def test_every_combination_is_checked_before_the_first_one_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a correction"):
        plan(tmp_path, "staleness.bound=0,1", arguments=("training.correction=none",))


def test_a_run_is_done_when_its_ledger_says_it_ended_by_itself(tmp_path: Path) -> None:
    assert not is_done(tmp_path / "nothing")
    for reason, done in (
        ("completed", True),
        ("exhausted", True),
        ("filtered_out", True),
        ("interrupted", False),
    ):
        ledger(tmp_path / reason, START, End(steps=1, reason=reason))  # type: ignore[arg-type]
        assert is_done(tmp_path / reason) is done
    ledger(tmp_path / "killed", START)
    assert not is_done(tmp_path / "killed")
    with (tmp_path / "completed" / "ledger.jsonl").open("a") as file:
        file.write('{"seq":2,')
    assert is_done(tmp_path / "completed")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that a sweep starts; those with seed 13 fail, others leave a finished ledger."""
    started: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        started.append(command)
        config = {key: value for key, _, value in (a.partition("=") for a in command)}
        if config.get("run.seed") == "13":
            return subprocess.CompletedProcess(command, 1)
        folder = Path(config["run.output_dir"].strip('"')) / config["run.name"].strip('"')
        ledger(folder, START, End(steps=0, reason="completed"))
        (folder / "metrics.jsonl").write_text("")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("staleflow.cli.sweep.subprocess.run", run)
    return started


def test_one_failure_does_not_stop_the_others_and_done_ones_are_skipped(
    tmp_path: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(tmp_path, "run.seed=12,13,14")
    assert run_sweep(made, resume=False) == 1
    assert len(commands) == 3
    assert "1 of 3 runs failed: seed=13" in capsys.readouterr().err
    assert (tmp_path / "s" / "report.html").is_file()
    assert run_sweep(made, resume=False) == 1
    assert len(commands) == 4  # only the one that failed


def test_only_begun_runs_are_resumed(tmp_path: Path, commands: list[list[str]]) -> None:
    made = plan(tmp_path, "run.seed=1,2")
    ledger(made.runs[1].folder, START)
    assert run_sweep(made, resume=True) == 0
    assert ["--resume" in command for command in commands] == [False, True]


@pytest.mark.parametrize(
    ("axis", "arguments", "key"),
    [
        ("run.name=a,b", (), "run.name"),
        ("run.output_dir=a,b", (), "run.output_dir"),
        ("run.seed=1,2", ("run.name=mine",), "run.name"),
    ],
)
def test_a_key_that_the_sweep_sets_itself_is_not_passed_over(
    tmp_path: Path, axis: str, arguments: tuple[str, ...], key: str
) -> None:
    with pytest.raises(UserError, match=f"a sweep sets {key} of each run itself: use --"):
        plan(tmp_path, axis, arguments=arguments)


def test_an_unfit_name_is_refused_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not name a folder inside"):
        plan_sweep([], ["run.seed=1,2"], name="../s", output_dir=str(tmp_path), environ={})


def test_a_config_from_a_pipe_is_refused_because_it_can_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="must be a file, not a pipe"):
        plan(tmp_path, "run.seed=1,2", arguments=(str(tmp_path / "pipe"),))


def test_a_finished_run_is_not_taken_for_one_with_another_config(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "seed=1"
    ledger(folder, START, End(steps=1, reason="completed"))
    old = load_config([], ["run.seed=1", "run.steps=3", "run.name=old", "telemetry.console=off"])
    (folder / "config.yaml").write_text(old.to_yaml())
    plan(tmp_path, "run.seed=1,2", arguments=("run.steps=3",))
    with pytest.raises(UserError, match=r"seed=1 had another run\.steps \(was 3, now 4\)"):
        plan(tmp_path, "run.seed=1,2", arguments=("run.steps=4",))


@pytest.mark.slow
def test_a_sweep_of_simulated_runs_compares_policies(tmp_path: Path) -> None:
    small = (
        *("run.steps=2", "data.batch_size=2", "data.group_size=2", "rollout.max_new_tokens=200"),
        *("simulation.rollout_gpus=2", "simulation.training_gpus=4", "simulation.prompt_tokens=20"),
    )
    arguments = ["sweep", *small, "--simulate", "--axis", "coordination.policy=sync,staleflow"]
    arguments += ["--seeds", "0", "--output-dir", str(tmp_path), "--name", "s"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Simulated machines" in (tmp_path / "s" / "report.html").read_text()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert not (tmp_path / "s" / "policy=sync,seed=0" / "wandb").exists()
    with pytest.raises(UserError, match="is a simulated one"):
        plan_sweep(list(small), ["coordination.policy=sync", "run.seed=0"], name="s",
                   output_dir=str(tmp_path), environ={})  # fmt: skip
