"""The cost model in a run: named by the config, followed by the fake engine, refined and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import ToyRun, toy_config

COSTS = {"k1": 2e-6, "k2": 0.0, "k3": 1e-3, "k4": 5e-3, "prefill": 1e-4, "pull": 0.02}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"model": COSTS}))
    return path


def run(model: Path, folder: Path, *overrides: str) -> ToyRun:
    made = ToyRun(toy_config(model, folder, "run.steps=8", *overrides), folder)
    assert made.run() == "completed"
    return made


def test_a_run_learns_what_its_engine_costs(model: Path, tmp_path: Path, file: Path) -> None:
    """A fake engine that follows a file, and a coordinator that starts without one."""
    made = run(model, tmp_path, f"rollout.fake.cost_model={file}")
    rows = made.monitor.take_rows()
    errors = [row.values["coord/cost_model_error"] for row in rows if row.kind == "train"]
    assert errors[-1] < 0.1
    (summary,) = [row.values for row in rows if row.kind == "summary"]
    learned = made.loop._control.view.cost_model
    assert {name: summary[f"coord/{name}"] for name in ("k1", "k2", "k3", "k4", "prefill")} == {
        name: getattr(learned, name) for name in ("k1", "k2", "k3", "k4", "prefill")
    }
    assert learned.step_s(6, 90) == pytest.approx(2e-6 * 90 + 6e-3 + 5e-3, rel=0.1)


def test_a_file_that_is_right_and_kept_has_no_error(model: Path, tmp_path: Path, file: Path) -> None:
    named = (f"rollout.fake.cost_model={file}", f"coordination.cost_model={file}")
    made = run(model, tmp_path, *named, "coordination.refine_costs=false")
    # A report's steps are averaged, and the model is linear where these instances run.
    assert made.loop._control.view.cost_error == pytest.approx(0, abs=1e-6)
    assert made.loop._control.view.cost_model.k3 == COSTS["k3"]


def test_an_engine_that_takes_no_time_leaves_the_start_values(model: Path, tmp_path: Path) -> None:
    made = run(model, tmp_path)
    rows = [row.values for row in made.monitor.take_rows() if row.kind == "train"]
    assert all("coord/cost_model_error" not in row for row in rows)
