"""WandbSink: explicit axes, late evaluations kept (F29), declared axes logged (F30), and never a dead run."""

from __future__ import annotations

import fnmatch
import json
import os
import struct
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from staleflow.telemetry.catalogue import AXES
from staleflow.telemetry.rows import Row
from staleflow.telemetry.wandb import METRICS, WandbSink, open_wandb


class FakeRun:
    """Keeps a payload only if its step is above the last one, as the real service does."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.id = arguments["id"] or "fresh"
        self.arguments = arguments
        self.axes: dict[str, str | None] = {}
        self.kept: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.finished = 0
        self.fails = False
        self._step = -1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, payload: dict[str, Any], step: int | None = None) -> None:
        if self.fails:
            raise ConnectionError("service\nis gone")
        step = self._step + 1 if step is None else step
        if step > self._step:
            self._step = step
            self.kept.append(payload)

    def finish(self) -> None:
        self.finished += 1


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.refuses = False

    def init(self, **arguments: Any) -> FakeRun:
        if self.refuses:
            raise TimeoutError("no answer")
        self.runs.append(FakeRun(arguments))
        return self.runs[-1]

    def Settings(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def teardown(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def start(tmp_path: Path, warnings: list[str], **changes: Any) -> WandbSink | None:
    arguments: dict[str, Any] = {
        "mode": "offline",
        "project": "staleflow",
        "entity": None,
        "run_name": "r",
        "folder": tmp_path,
        "config": {"staleness": {"bound": 1}},
        "warn": warnings.append,
    }
    return open_wandb(**{**arguments, **changes})


def test_a_late_evaluation_of_an_older_version_is_kept_and_drawn_over_its_version(
    tmp_path: Path, fake: FakeWandb
) -> None:
    """F29: evaluations of versions 5 and 4 arrive at one moment, after the train row of step 7."""
    sink = start(tmp_path, [])
    assert sink is not None
    for step in range(8):
        sink.write(Row(kind="train", time=0.0, values={"train/step": step, "train/loss": 0.1}))
    for version in (5, 4):
        sink.write(
            Row(kind="eval", time=0.0, values={"eval/weight_version": version, "eval/heldout/avg@1": 0.5})
        )
    run = fake.runs[0]
    assert [p["train/step"] for p in run.kept if "train/step" in p] == list(range(8))
    assert [p["eval/weight_version"] for p in run.kept if "eval/weight_version" in p] == [5, 4]
    assert run.axes["eval/*"] == "eval/weight_version"


def test_every_declared_axis_is_in_every_payload_of_its_kind(tmp_path: Path, fake: FakeWandb) -> None:
    """F30: what define_metric names as an axis is logged with all metrics drawn over it."""
    sink = start(tmp_path, [])
    assert sink is not None
    sink.write(
        Row(
            kind="train",
            time=0.0,
            values={"train/step": 0, "staleness/in_flight/mean": 0.5, "timing_s/pull": 1.0},
        )
    )
    sink.write(Row(kind="eval", time=0.0, values={"eval/weight_version": 0, "eval/heldout/avg@1": 0.5}))
    sink.write(
        Row(
            kind="instances",
            time=0.0,
            values={"run/seconds": 1.0, "instance/0/running": 3, "trainer/busy": 1},
        )
    )
    run = fake.runs[0]
    assert set(run.axes.values()) - {None} == set(AXES.values()) == set(METRICS.values())
    axes_logged = set()
    for payload in run.kept:
        for key in payload:
            axis = next((a for pattern, a in METRICS.items() if fnmatch.fnmatch(key, pattern)), None)
            if axis is not None:
                assert axis in payload, f"{key} was logged without {axis}"
                axes_logged.add(axis)
    assert axes_logged == set(AXES.values())


@pytest.mark.parametrize("kind", ["train", "eval", "instances"])
def test_a_row_without_its_axis_is_refused(tmp_path: Path, fake: FakeWandb, kind: Any) -> None:
    sink = start(tmp_path, [])
    assert sink is not None
    with pytest.raises(ValueError, match=AXES[kind]):
        sink.write(Row(kind=kind, time=0.0, values={"a": 1}))
    assert fake.runs[0].kept == []


def test_what_is_not_finite_is_left_out_and_events_are_not_drawn(tmp_path: Path, fake: FakeWandb) -> None:
    sink = start(tmp_path, [])
    assert sink is not None
    sink.write(Row(kind="train", time=0.0, values={"train/step": 0, "train/loss": float("nan")}))
    sink.write(Row(kind="event", time=0.0, values={"event/name": "x", "event/text": "y"}))
    sink.write(Row(kind="summary", time=0.0, values={"run/steps": 1}))
    assert fake.runs[0].kept == [{"train/step": 0}]
    assert fake.runs[0].summary == {"run/steps": 1}


def test_a_resumed_run_goes_on_under_its_identity(tmp_path: Path, fake: FakeWandb) -> None:
    first = start(tmp_path, [])
    second = start(tmp_path, [], resume_id="abc")
    assert first is not None
    assert second is not None
    assert (first.run_id, second.run_id) == ("fresh", "abc")
    assert [run.arguments["resume"] for run in fake.runs] == [None, "allow"]


def test_mode_disabled_is_no_sink_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    assert start(tmp_path, warnings, mode="disabled") is None
    assert warnings == []


def test_a_missing_wandb_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    warnings: list[str] = []
    assert start(tmp_path, warnings) is None
    assert len(warnings) == 1
    assert "the run goes on without it" in warnings[0]


def test_a_wandb_that_does_not_start_is_one_warning(tmp_path: Path, fake: FakeWandb) -> None:
    fake.refuses = True
    warnings: list[str] = []
    assert start(tmp_path, warnings) is None
    assert warnings == [
        "Weights & Biases did not start (TimeoutError: no answer); the run goes on without it",
    ]


def test_a_wandb_that_breaks_during_the_run_is_one_warning_and_then_silence(
    tmp_path: Path, fake: FakeWandb
) -> None:
    warnings: list[str] = []
    sink = start(tmp_path, warnings)
    assert sink is not None
    fake.runs[0].fails = True
    for step in range(3):
        sink.write(Row(kind="train", time=0.0, values={"train/step": step}))
    sink.close()
    assert warnings == [
        "Weights & Biases failed (ConnectionError: service is gone); the run goes on without it",
    ]


def test_closing_twice_finishes_once(tmp_path: Path, fake: FakeWandb) -> None:
    sink = start(tmp_path, [])
    assert sink is not None
    sink.close()
    sink.close()
    assert fake.runs[0].finished == 1


def history(path: Path) -> list[dict[str, Any]]:
    """Read a `.wandb` file without the client: 7 bytes of header, then LevelDB blocks of 32 KiB with records
    of (checksum 4, length 2, type 1), perhaps split over blocks: type 1 whole, 2 first, 3 middle, 4 last."""
    from wandb.proto import wandb_internal_pb2

    data, offset, part, rows = path.read_bytes(), 7, b"", []
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        part += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(part)
            part = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.filterwarnings("default")
def test_a_real_offline_run_holds_every_row_prints_nothing_and_leaves_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F29 and F30 against the real client: the file on disk is read back without it."""
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    warnings: list[str] = []
    sink = start(tmp_path, warnings)
    assert sink is not None
    for step in range(8):
        sink.write(Row(kind="train", time=0.0, values={"train/step": step, "train/loss": 1.0 / (step + 1)}))
    for version in (5, 4):
        sink.write(
            Row(kind="eval", time=0.0, values={"eval/weight_version": version, "eval/heldout/avg@1": 0.5})
        )
    sink.close()

    (path,) = tmp_path.rglob("*.wandb")
    rows = history(path)
    assert [row["train/step"] for row in rows if "train/step" in row] == list(range(8))
    assert [row["eval/weight_version"] for row in rows if "eval/weight_version" in row] == [5, 4]
    assert warnings == []
    assert capfd.readouterr() == ("", "")
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert alive == []
