"""The configs that are shipped: each is checked whole, on a machine that has none of what it names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.config import load_config
from staleflow.errors import RunFailed
from staleflow.runtime import preflight
from staleflow.runtime.preflight import run_problems

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
EXPECTED = {"default", "cpu-vllm", "smollm2", "gpu1", "gpu8", "gpu128", "cluster_h20"}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models at home, none of the optional packages, no cluster."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def no_cluster(*_: object) -> None:
        raise RunFailed("no Ray cluster answers")

    monkeypatch.setattr(preflight, "build_cluster", no_cluster)


def test_the_configs_are_there() -> None:
    assert {path.stem for path in CONFIGS} >= EXPECTED


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_dry_run_checks_the_config_and_names_what_the_machine_lacks(path: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(path), "--dry-run"])
    assert result.exit_code == 0, result.output
    text = yaml.safe_load(result.stdout)
    assert load_config([path], [], {}).model_dump(mode="json") == text
    notes = result.stderr.splitlines()
    assert all(line.startswith("note: ") for line in notes), notes
    rollout, training = text["rollout"], text["training"]
    for name, used in (("vllm", rollout["engine"]), ("deepspeed", training["trainer"])):
        assert any(f" is {name}, but " in note for note in notes) == (used == name)
    assert ("note: no Ray cluster answers" in notes) == (text["cluster"]["address"] is not None)
    if not text["model"]["source"].startswith("builtin:"):
        assert any("model.source" in note for note in notes)


@pytest.mark.usefixtures("bare")
def test_the_command_that_makes_the_missing_model_is_named() -> None:
    notes = run_problems(load_config([CONFIGS[0].with_name("smollm2.yaml")], [], {}))
    assert any("staleflow model smollm2" in note for note in notes)
    data = ["data.source=jsonl", "data.path=/nowhere.jsonl", "data.options.held_out_path=/none.jsonl"]
    notes = run_problems(load_config([], [*data, "model.tokenizer=/no"], {}))
    assert [note.partition(":")[0] for note in notes] == [
        "model.tokenizer",
        "data.path",
        "data.options.held_out_path",
    ]


def test_parts_of_ones_own_that_cannot_be_loaded_are_named() -> None:
    own = [
        "rollout.engine=no_such.Engine",
        "training.algorithm=os.nope",
        "reward.verifier=json.dumpz",
        "training.kl.coefficient=0.1",
        "training.kl.reference=/no/model",
    ]
    notes = run_problems(load_config([], own, {}))
    for note, part in zip(notes, ("PYTHONPATH", "os has no", "json has no", "/no/model"), strict=True):
        assert part in note


def test_nothing_is_missing_for_a_bare_run() -> None:
    assert run_problems(load_config([], [], {})) == []
