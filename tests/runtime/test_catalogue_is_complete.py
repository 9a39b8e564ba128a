"""Every metric that runs record is in the catalogue, and runs record every metric of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import ToyRun, toy_config

from staleflow.config import load_config
from staleflow.runtime.assembly.simulated import build_simulated_session
from staleflow.runtime.start import RunPaths
from staleflow.simulation.hardware import cluster_settings
from staleflow.telemetry.catalogue import AXES, CATALOGUE, FOREIGN, find
from staleflow.telemetry.rows import Row

COSTS = {"k1": 2e-6, "k2": 0.0, "k3": 1e-3, "k4": 5e-3, "prefill": 1e-4, "pull": 0.02}


@pytest.fixture(scope="module")
def rows(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Rows of runs in which every feature that has metrics of its own is on."""
    folder = tmp_path_factory.mktemp("runs")
    costs = folder / "costs.json"
    costs.write_text(json.dumps({"model": COSTS}))
    found: list[Row] = []
    for name, overrides in {
        "evaluated": (
            f"rollout.fake.cost_model={costs}",
            "evaluation.every=2",
            "evaluation.prompts=4",
            "evaluation.samples=2",
            "evaluation.pass_at=[1, 2]",
        ),
        "reference": ("training.kl.coefficient=0.01", "run.steps=2"),
        "critic": ("training.algorithm=ppo", "run.steps=2"),
    }.items():
        run = ToyRun(toy_config(model, folder, *overrides), folder / name)
        assert run.run() == "completed"
        found += run.monitor.take_rows()
    return [*found, *simulated(folder / "simulated")]


def simulated(folder: Path) -> Iterator[Row]:
    folder.mkdir()
    overrides = ["run.name=s", "run.steps=3", "data.batch_size=2", "data.group_size=2"]
    config = load_config([], overrides, {}, simulated=True)
    paths = RunPaths(name="s", ledger=folder / "ledger.jsonl", checkpoints=folder, logs=folder)
    session = build_simulated_session(config, cluster_settings(config), paths)
    while session.outcome() is None:
        yield from session.look(0.1)[0]
    yield from session.look(0.1)[0]


def test_every_name_is_in_the_catalogue_with_the_kind_of_its_row(rows: list[Row]) -> None:
    unknown = {
        (row.kind, name)
        for row in rows
        for name in row.values
        if (metric := find(name)) is None or metric is FOREIGN or row.kind not in metric.kinds
    }
    assert unknown == set()


def test_every_line_of_the_catalogue_is_recorded_with_each_of_its_kinds(rows: list[Row]) -> None:
    recorded = {(metric.name, row.kind) for row in rows for name in row.values if (metric := find(name))}
    promised = {(metric.name, kind) for metric in CATALOGUE.values() for kind in metric.kinds}
    own = {(FOREIGN.name, "train")}  # of trainers that are plugged in
    assert promised - recorded == own


def test_numbers_are_numbers_and_only_texts_are_not_summed_up(rows: list[Row]) -> None:
    for row in rows:
        for name, value in row.values.items():
            metric = find(name)
            assert metric is not None
            assert isinstance(value, str) == (metric.over_steps == "none"), name


def test_every_row_has_the_axis_of_its_kind(rows: list[Row]) -> None:
    """F30."""
    assert {row.kind for row in rows} >= AXES.keys()
    assert all(AXES[row.kind] in row.values for row in rows if row.kind in AXES)
