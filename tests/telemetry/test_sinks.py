"""JsonlSink and Fanout: what is on disk after each row, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.telemetry.jsonl import JsonlSink
from staleflow.telemetry.rows import Row
from staleflow.telemetry.sinks import Fanout


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_one_line_and_is_on_disk_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(Row(kind="train", time=12.5, values={"train/step": 3, "train/loss": 0.25, "train/note": "é"}))
    assert lines(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "time": 12.5, "train/step": 3, "train/loss": 0.25, "train/note": "é"}
    ]
    sink.close()
    sink.close()


def test_opening_again_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        sink = JsonlSink(path)
        sink.write(Row(kind="train", time=0.0, values={"train/step": step}))
        sink.close()
    assert [line["train/step"] for line in lines(path)] == [0, 1]


def test_what_is_not_finite_becomes_null_and_the_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    values = {
        "a": float("nan"),
        "b": float("inf"),
        "c": float("-inf"),
        "d": float(np.float32("nan")),
        "e": 1.0,
    }
    sink.write(Row(kind="train", time=0.0, values={f"train/{name}": value for name, value in values.items()}))
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    expected = {"a": None, "b": None, "c": None, "d": None, "e": 1.0}
    assert line == {"kind": "train", "time": 0.0, **{f"train/{name}": v for name, v in expected.items()}}


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    values: dict[str, Any] = {
        "train/i": np.int64(7), "train/f": np.float32(0.5), "train/n": np.float32("inf"),
    }  # fmt: skip
    sink.write(Row(kind="train", time=0.0, values=values))
    sink.close()
    assert lines(path) == [{"kind": "train", "time": 0.0, "train/i": 7, "train/f": 0.5, "train/n": None}]


def test_a_line_torn_by_a_kill_does_not_swallow_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "time": 1.0, "train/st')
    sink = JsonlSink(path)
    sink.write(Row(kind="train", time=2.0, values={"train/step": 4}))
    sink.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"kind": "train", "time": 1.0, "train/st'
    assert json.loads(whole)["train/step"] == 4


class Recorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.rows: list[Row] = []
        self.closed = False
        self._fails = fails

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True
        if self._fails:
            raise OSError("disk full")


def test_a_fanout_writes_to_all_and_closes_all_even_when_one_fails() -> None:
    first, second = Recorder(fails=True), Recorder()
    fanout = Fanout([first, second])
    row = Row(kind="event", time=0.0, values={})
    fanout.write(row)
    with pytest.raises(OSError, match="disk full"):
        fanout.close()
    assert first.rows == second.rows == [row]
    assert first.closed
    assert second.closed
