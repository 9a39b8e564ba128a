"""The table of metrics: its names, what values come to over steps, and who is told of unknown names."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.telemetry import catalogue
from staleflow.telemetry.catalogue import AXES, CATALOGUE, FOREIGN, UnknownMetric, find, summarize
from staleflow.telemetry.jsonl import JsonlSink
from staleflow.telemetry.metric import PLACEHOLDERS
from staleflow.telemetry.metrics_page import metrics_page
from staleflow.telemetry.rows import Row, RowKind
from staleflow.telemetry.wandb import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_no_name_stands_twice() -> None:
    assert len(CATALOGUE) == len(catalogue._TABLE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_line_is_well_formed(name: str) -> None:
    metric = CATALOGUE[name]
    plain = re.sub(r"<(\w+)>", "x", name)
    assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z0-9_@]+)+", plain), "slash-separated"
    assert {"mean", "max", "min"}.isdisjoint(name.split("/")[:-1]), "mean, max and min stand last"
    assert set(re.findall(r"<(\w+)>", name)) <= PLACEHOLDERS.keys()
    assert metric.kinds
    assert metric.meaning.endswith(".")
    assert not metric.weight or (metric.over_steps == "mean" and metric.weight in CATALOGUE)
    assert not metric.figure or metric.over_steps == "sum", "the comparison shows sums over the run"
    assert bool(metric.title) == bool(metric.figure or metric.curve)
    for kind in metric.kinds:
        weight = CATALOGUE.get(metric.weight)
        assert weight is None or kind in weight.kinds, "a weight stands in the same row"


def test_a_metric_of_wandb_has_one_axis_and_the_axis_is_in_rows_of_its_kind() -> None:
    for kind, axis in AXES.items():
        assert kind in CATALOGUE[axis].kinds
    drawn = [(m, kind) for m in CATALOGUE.values() for kind in m.kinds if kind in AXES]
    for metric, kind in drawn:
        if metric.name not in AXES.values():
            assert METRICS[f"{metric.section}/*"] == AXES[kind], metric.name


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("staleness/max", "staleness/max"),
        ("instance/i0/running", "instance/<i>/running"),
        ("instance/rollout-12/kv_usage", "instance/<i>/kv_usage"),
        ("buffer/3/occupied", "buffer/<offset>/occupied"),
        ("buffer/x/occupied", None),
        ("lengths/sampled/16", "lengths/sampled/<bucket>"),
        ("lengths/sampled/mean", "lengths/sampled/mean"),
        ("eval/heldout/avg@8", "eval/<set>/avg@<k>"),
        ("eval/heldout/avg@all", None),
        ("train/loss", "train/loss"),
        ("train/critic/loss", "train/critic/loss"),
        ("train/my_loss/aux", "train/<other>"),
        ("my_trainer/loss", None),
        ("train/", None),
        ("instance/a/b/running", None),
        ("xbuffer/3/occupied", None),
    ],
)
def test_a_name_is_found_in_its_line(name: str, line: str | None) -> None:
    metric = find(name)
    assert (metric.name if metric else None) == line


STEPS = (
    {"rollout/groups": 3, "rollout/response_len_mean": 10.0, "train/loss": 1.0, "coord/pull_count": 2,
     "staleness/max": 0, "staleness/min": 0, "tokens/trained": 100, "lengths/sampled/mean": 4.0,
     "lengths/sampled/4": 1, "lengths/sampled/8": 0},
    {"rollout/groups": 1, "rollout/response_len_mean": 30.0, "train/loss": 2.0, "coord/pull_count": 5,
     "staleness/max": 2, "staleness/min": 1, "tokens/trained": 150, "lengths/sampled/mean": 8.0,
     "lengths/sampled/4": 1, "lengths/sampled/8": 2},
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("coord/pull_count", 7.0),  # 2 + 5
        ("train/loss", 1.5),  # each step alike
        ("rollout/response_len_mean", 15.0),  # (3 * 10 + 1 * 30) / 4 groups
        ("lengths/sampled/mean", 7.0),  # (1 * 4 + 3 * 8) / 4 trajectories
        ("lengths/sampled/8", 2.0),
        ("staleness/max", 2.0),
        ("staleness/min", 1.0 - 1.0),
        ("tokens/trained", 150.0),  # a total of the attempt
        ("train/entropy", None),  # no row has it
    ],
)
def test_values_over_steps(name: str, expected: float | None) -> None:
    assert summarize(name, STEPS) == expected


def test_rows_without_a_weight_count_alike_and_what_is_no_number_not_at_all() -> None:
    rows = [{"train/kl": 1.0}, {"train/kl": None}, {"train/kl": 3.0}, {"run/reason": "completed"}]
    assert summarize("train/kl", rows) == 2.0
    assert summarize("run/reason", rows) is None


def test_summing_up_an_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="rollout/reward_men"):
        summarize("rollout/reward_men", [{"rollout/reward_men": 1.0}])


@pytest.mark.parametrize(
    ("kind", "name"), [("train", "rollout/reward_men"), ("eval", "train/loss"), ("train", "run/steps")]
)
def test_a_row_with_an_unknown_name_is_recorded_and_warned_of(
    kind: RowKind, name: str, tmp_path: Path
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    row = Row(kind=kind, time=0.0, values={name: 1.5})
    with pytest.warns(UnknownMetric, match=name):
        sink.write(row)
    sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())[name] == 1.5


def test_a_trainer_of_ones_own_may_add_metrics_under_its_prefix(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.write(Row(kind="train", time=0.0, values={"train/step": 0, "train/aux/loss": 1.0}))
    sink.close()
    assert FOREIGN.unit == ""


def test_the_page_in_docs_is_what_the_command_prints() -> None:
    """After a change of the table: `staleflow metrics > docs/metrics.md`."""
    assert PAGE.read_text(encoding="utf-8") == metrics_page()
    assert CliRunner().invoke(app, ["metrics"]).stdout == metrics_page()
    for name in CATALOGUE:
        assert f"| `{name}` " in metrics_page()
