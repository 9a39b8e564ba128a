"""`staleflow plan` from the outside: table, JSON, overlay, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.config import load_config
from staleflow.simulation.hardware import cluster_settings

SMALL = [
    "data.batch_size=4",
    "data.group_size=4",
    "rollout.max_new_tokens=1024",
    "simulation.prompt_tokens=256",
    "--gpus",
    "6",
    "--jobs",
    "1",
]


def plan(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *SMALL, *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_table_names_the_choice_its_bound_and_what_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = plan("--eta", "1", "--budget", "2")
    assert "qwen2.5-14b on 6 H20, 4 x 4 trajectories a step, policy staleflow" in text
    assert "> " in text
    assert "x 1 + " in text
    assert "for training, η = 1: the fastest. Bounds: rollout" in text


def test_json_has_every_simulated_layout() -> None:
    figures = json.loads(plan("--eta", "1,2", "--budget", "3", "--json"))
    assert 1 <= len(figures["simulated"]) <= 3
    assert figures["chosen"] in [{key: row[key] for key in figures["chosen"]} for row in figures["simulated"]]
    for row in figures["simulated"]:
        assert row["rollout_gpus"] + row["training_gpus"] == 6
        assert row["of_bound"] == pytest.approx(row["tokens_per_s"] / min(row["bounds"].values()))


def test_two_processes_find_what_one_finds() -> None:
    arguments = ("--eta", "1,2", "--budget", "2", "--json")
    together = json.loads(plan(*arguments, "--jobs", "2"))
    alone = json.loads(plan(*arguments))
    assert together == alone


def test_the_overlay_is_a_config_of_the_choice_and_never_replaces_a_file_silently(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    figures = json.loads(plan("--eta", "2", "--budget", "1", "--json", "-o", str(path)))
    chosen, (row,) = figures["chosen"], figures["simulated"]
    overrides = [argument for argument in SMALL if "=" in argument]
    config = load_config([path], overrides)
    assert config.staleness.bound == chosen["bound"] == 2
    assert config.simulation.rollout_gpus == chosen["rollout_gpus"]
    assert config.rollout.instances == row["instances"]
    cluster = cluster_settings(config)
    assert (cluster.instances, cluster.kv_capacity) == (row["instances"], row["kv_capacity"])
    assert "trained tokens/s" in path.read_text()
    before = path.read_text()
    assert "exists" in plan("--eta", "2", "-o", str(path), code=2)
    assert path.read_text() == before
    plan("--eta", "1", "--budget", "1", "-o", str(path), "--force")
    assert path.read_text() != before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--eta", "1.5"], "--eta is '1.5', not a list of whole numbers"),
        (["--gpus", "3"], "3 H20 are too few for qwen2.5-14b"),
        (["simulation.model=nothing"], "neither a folder nor a known model"),
    ],
)
def test_refusals_come_before_any_simulation(arguments: list[str], said: str) -> None:
    assert said in plan(*arguments, code=2)
