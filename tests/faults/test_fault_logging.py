"""Late evaluations are kept (F29), every payload carries its axis (F30), typos are told by command (F32)."""

from __future__ import annotations

import fnmatch
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.runtime.backend import Evaluated, Message, StepTrained
from staleflow.telemetry.rows import Row
from staleflow.telemetry.wandb import METRICS, WandbSink, open_wandb


class StrictRun:
    """Drops a payload whose step is not above the last one, and knows the declared axes."""

    def __init__(self, **arguments: Any) -> None:
        self.id = "strict"
        self.axes: dict[str, str | None] = {}
        self.kept: list[dict[str, Any]] = []
        self.dropped: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self._step = -1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, payload: dict[str, Any], step: int | None = None) -> None:
        step = self._step + 1 if step is None else step
        (self.kept if step > self._step else self.dropped).append(payload)
        self._step = max(step, self._step)

    def finish(self) -> None:
        """Nothing to upload."""


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WandbSink:
    module = types.ModuleType("wandb")
    module.init = StrictRun  # type: ignore[attr-defined]
    module.Settings = dict  # type: ignore[attr-defined]
    module.teardown = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    opened = open_wandb(
        mode="offline", project="p", entity=None, run_name="r", folder=tmp_path, config={}, warn=pytest.fail
    )
    assert opened is not None
    return opened


def hold_evaluations_back(run: ToyRun, steps: int) -> None:
    """An evaluation arrives only when so many further steps have been trained, or the run is over."""
    backend, control = run.loop._backend, run.loop._control
    original = backend.poll
    held: list[tuple[int, Evaluated]] = []
    trained = [0]

    def poll(timeout_s: float) -> list[Message]:
        passed: list[Message] = []
        for message in original(timeout_s):
            trained[0] += isinstance(message, StepTrained)
            if isinstance(message, Evaluated):
                held.append((trained[0] + steps, message))
            else:
                passed.append(message)
        due = [h for h in held if h[0] <= trained[0] or control.view.finished is not None]
        held[:] = [h for h in held if h not in due]
        return passed + [message for _, message in due]

    backend.poll = poll  # type: ignore[method-assign]


def test_evaluations_that_arrive_two_steps_late_are_all_kept_over_their_version(
    model: Path, tmp_path: Path, sink: WandbSink
) -> None:
    """F29: every version of a run is evaluated, each answer is two steps late or more, the last ones come in
    when training is over; and F30: every metric that the run logs has its axis in the same payload."""
    config = toy_config(
        model, tmp_path, "evaluation.every=1", "evaluation.prompts=4", "run.steps=7", "evaluation.backlog=8"
    )
    run = ToyRun(config, tmp_path)
    hold_evaluations_back(run, 2)
    assert run.run() == "completed"
    rows: list[Row] = run.monitor.take_rows()
    order = [(row.kind, row.values) for row in rows if row.kind in ("train", "eval")]
    at = {v["eval/weight_version"]: i for i, (kind, v) in enumerate(order) if kind == "eval"}
    step_5 = next(i for i, (kind, v) in enumerate(order) if kind == "train" and v["train/step"] == 5)
    assert at[4] > step_5, "version 4 was in time, so nothing was tested"
    for row in rows:
        sink.write(row)
    logged: StrictRun = sink._run
    assert logged.dropped == []
    evaluated = [p["eval/weight_version"] for p in logged.kept if "eval/weight_version" in p]
    assert evaluated == list(range(8))
    assert [p["train/step"] for p in logged.kept if "train/step" in p] == list(range(7))
    axes = {axis for axis in logged.axes.values() if axis is not None}
    for payload in logged.kept:
        drawn = [next((a for p, a in METRICS.items() if fnmatch.fnmatch(k, p)), None) for k in payload]
        needed = {axis for axis in drawn if axis is not None}
        assert needed <= payload.keys()
        assert len(needed) == 1, "one payload, one axis"
        axes -= needed
        assert all(axis or key == "run/seconds" for key, axis in zip(payload, drawn, strict=True)), payload
    assert axes == set(), "an axis was declared that no payload has"


@pytest.mark.parametrize("place", ["file", "override", "environment", "sweep axis", "sweep override", "list"])
def test_a_typo_anywhere_is_exit_2_with_key_and_what_was_meant(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F32: staleness.eat=2, wherever it is written; and a wrong element of a list."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.yaml").write_text("staleness:\n  eat: 2\n")
    if place == "environment":
        monkeypatch.setenv("STALEFLOW__STALENESS__EAT", "2")
    arguments = {
        "file": ["run", "typo.yaml"],
        "override": ["run", "staleness.eat=2"],
        "environment": ["run"],
        "sweep axis": ["sweep", "--axis", "staleness.eat=1,2"],
        "sweep override": ["sweep", "--eta", "0,1", "staleness.eat=2"],
        "list": ["run", "training.betas=[0.9, 0,95]"],
    }[place]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    if place == "list":
        assert "training.betas" in result.stderr
    else:
        assert "staleness.eat: unknown key" in result.stderr
        assert "did you mean staleness.bound" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["typo.yaml"]
