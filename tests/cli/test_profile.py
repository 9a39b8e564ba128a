"""`staleflow profile`: measures, says how well the model fits, and saves what a config can name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.config import load_config
from staleflow.coordination.cost_model import START_VALUES
from staleflow.errors import ConfigError
from staleflow.runtime.assembly import build_costs
from staleflow.runtime.preflight import prepare_run
from staleflow.storage.cost_file import load_cost_model

SMALL = ("rollout.max_running=3", "rollout.kv_capacity_tokens=400")


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """A cost model's file."""
    path = tmp_path / "by_hand.json"
    path.write_text('{"model": {"k1": 1e-6, "k2": 0, "k3": 1e-4, "k4": 0.002, "prefill": 1e-5}}')
    return path


def test_the_default_engine_is_profiled_into_a_file_that_configs_name(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    result = call("profile", *SMALL, "--repeats", "1", "--cpu-time", "--output", str(target))
    assert result.exit_code == 0, result.output
    assert "decode steps" in result.stdout
    assert "few running" in result.stdout
    assert "…" not in result.stdout, "no figure is cut off"
    assert f"coordination.cost_model={target}" in result.stdout.replace("\n", "")
    saved = json.loads(target.read_text())
    assert (saved["engine"], saved["model_source"], saved["clock"]) == ("torch", "builtin:sums", "cpu")
    assert {"python", "torch", "staleflow"} <= set(saved["versions"])
    assert saved["errors"]["decode steps, all"]["held_out"]["points"] > 0
    assert sum(load["held_out"] for load in saved["loads"]) < len(saved["loads"])
    model = load_cost_model(target)
    assert model.step_s(1, 8) > 0
    assert build_costs(load_config([], [f"coordination.cost_model={target}"])).model == model


def test_the_fake_engine_is_profiled_on_its_cost_model(by_hand: Path, tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    engine = ("rollout.engine=fake", f"rollout.fake.cost_model={by_hand}")
    result = call("profile", *SMALL, *engine, "--repeats", "2", "-o", str(target))
    assert result.exit_code == 0, result.output
    found, true = load_cost_model(target), load_cost_model(by_hand)
    assert true.step_s(1, 8) <= found.step_s(1, 8) < 3 * true.step_s(1, 8)  # sleeping takes a little longer


def test_an_existing_file_is_kept_and_nothing_is_measured(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    target.write_text("mine")
    result = call("profile", "--output", str(target))
    assert result.exit_code == 2
    assert "give --force to replace it" in result.stderr
    assert target.read_text() == "mine"


def test_cpu_time_is_refused_where_it_says_nothing(tmp_path: Path) -> None:
    target = str(tmp_path / "costs.json")
    for engine in ("rollout.engine=fake", "rollout.threads=2"):
        result = call("profile", engine, "--cpu-time", "-o", target)
        assert result.exit_code == 2
        assert "--cpu-time measures the torch engine with one thread" in result.stderr


def test_without_a_file_a_run_starts_with_the_start_values() -> None:
    assert build_costs(load_config([], [])).model == START_VALUES


def test_a_bad_cost_model_is_refused_before_a_run_starts(tmp_path: Path) -> None:
    for key in ("coordination.cost_model", "rollout.fake.cost_model"):
        config = load_config([], [f"{key}={tmp_path / 'nothing.json'}"])
        with pytest.raises(ConfigError, match="cannot be read"):
            prepare_run(config, resume=False, clean=False)


def test_a_fake_engine_has_one_source_of_its_times(by_hand: Path) -> None:
    both = [f"rollout.fake.cost_model={by_hand}", "rollout.fake.seconds_per_step=0.1"]
    with pytest.raises(ConfigError, match="already sets the time of a step"):
        load_config([], both)
