"""The cost model's file: read whole or refused with what is wrong; never overwritten by accident."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from staleflow.coordination.cost_model import CostModel
from staleflow.errors import ConfigError, UserError
from staleflow.storage.cost_file import load_cost_model, save_cost_model

MODEL = CostModel(k1=1e-7, k2=2e-3, k3=3e-5, k4=1e-3, prefill=4e-5, pull=0.5)


def test_what_is_saved_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_cost_model(path, MODEL, {"engine": "torch"})
    assert load_cost_model(path) == MODEL
    assert json.loads(path.read_text())["engine"] == "torch"
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


def test_the_constants_are_all_that_is_needed_and_pull_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.json"
    path.write_text('{"model": {"k1": 0, "k2": 0, "k3": 0, "k4": 0.01, "prefill": 0}}')
    assert load_cost_model(path) == CostModel(k1=0, k2=0, k3=0, k4=0.01, prefill=0, pull=0.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k1": None}, "lacks k1"),
        ({"k5": 1.0}, "has an unknown k5"),
        ({"k1": -1e-9}, "has k1 = -1e-09, which must be a number of at least 0"),
        ({"k1": "fast"}, 'has k1 = "fast", which'),
        ({"k1": True}, "has k1 = true, which"),
        ({"k1": float("inf")}, "has k1 = Infinity, which"),
        ({"k1": float("nan")}, "has k1 = NaN, which"),
        ({"k2": 0, "k3": 0, "k4": 0}, "gives a step no duration"),
    ],
)
def test_constants_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "costs.json"
    model = {k: v for k, v in {**asdict(MODEL), **change}.items() if v is not None}
    path.write_text(json.dumps({"model": model}))
    with pytest.raises(ConfigError, match="a file that `staleflow profile` wrote") as refusal:
        load_cost_model(path)
    assert complaint in str(refusal.value)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "model"'),
        ('{"model": 3}', 'has no "model"'),
        (b"\xff", "not JSON"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=complaint):
        load_cost_model(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cost_model(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cost_model(tmp_path)


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("mine")
    with pytest.raises(UserError, match="give --force to replace it"):
        save_cost_model(path, MODEL, {})
    assert path.read_text() == "mine"
    save_cost_model(path, MODEL, {}, force=True)
    assert load_cost_model(path) == MODEL


def test_places_where_no_file_can_go_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        save_cost_model(tmp_path, MODEL, {}, force=True)
    with pytest.raises(UserError, match=r"the folder .* does not exist"):
        save_cost_model(tmp_path / "no" / "costs.json", MODEL, {})
