"""Reading a run folder: whole, torn, half there, resumed, still going."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from staleflow.errors import RunFolderError
from staleflow.reporting.load import load_run, series


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(step: int, seconds: float, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "time": 0.0, "train/step": step, "run/seconds": seconds, **values}


def evaluation(version: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "eval", "time": 0.0, "eval/weight_version": version, "eval/heldout/avg@1": accuracy}


def trained(step: int, *lags_and_tokens: tuple[int, int]) -> dict[str, Any]:
    items = [
        {"id": f"s{step}-m{i}", "min": step - lag, "max": step, "tokens": tokens, "hash": "00"}
        for i, (lag, tokens) in enumerate(lags_and_tokens)
    ]
    return {"kind": "trained", "step": step, "version": step, "trajectories": items}


def test_a_finished_run_is_read_whole(make_run: Callable[..., Path]) -> None:
    run = load_run(make_run("demo", bound=1, steps=10))
    assert run.name == "demo"
    assert [row["train/step"] for row in run.train] == list(range(10))
    assert [row["eval/weight_version"] for row in run.evals] == [0, 5, 10]
    assert len(run.instances) == 20
    assert run.events[0]["event/name"] == "verifier killed"
    assert run.summary["run/reason"] == "completed"
    assert len(run.trained) == 10 * 16
    assert run.config["staleness"] == {"bound": 1}
    assert run.config_text.startswith("# staleflow")
    assert (run.audit.violations, run.audit.text) == (0, "0 violations")
    assert run.skipped_lines == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_torn_last_line_is_left_out(make_run: Callable[..., Path], name: str) -> None:
    folder = make_run("demo", steps=4)
    with (folder / name).open("a") as file:
        file.write('{"seq": 99999, "kind": "trai')
    run = load_run(folder)
    assert run.skipped_lines == 1
    assert len(run.train) == 4
    assert len(run.trained) == 4 * 16


def test_a_line_torn_inside_a_character_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(train(0, 1.0)).encode() + b'\n{"a": "\xc3')
    assert [row["train/step"] for row in load_run(tmp_path).train] == [0]


def test_missing_files_are_no_error_as_long_as_something_is_there(make_run: Callable[..., Path]) -> None:
    folder = make_run("demo", steps=4)
    (folder / "config.yaml").unlink()
    (folder / "ledger.jsonl").unlink()
    run = load_run(folder)
    assert (run.config, run.trained) == ({}, ())
    assert (run.audit.violations, run.audit.text) == (None, "no ledger")
    assert run.name == "demo"


def test_a_half_written_config_is_as_none(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(0, 1.0))
    (tmp_path / "config.yaml").write_text("run: {name: 'x")
    assert load_run(tmp_path).config == {}


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a run folder: it has neither"):
        load_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"absent is not a folder"):
        load_run(tmp_path / "absent")


def test_a_run_still_going_has_no_summary(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(0, 1.0), train(1, 2.0))
    run = load_run(tmp_path)
    assert run.summary == {}
    assert len(run.train) == 2


def test_what_a_resume_voids_is_gone_and_later_rows_win(tmp_path: Path) -> None:
    """The first attempt got to step 4 and was killed; the second resumed from step 2 and is at step 3."""
    write(
        tmp_path / "metrics.jsonl",
        *(train(step, 10.0 * (step + 1), note="first") for step in range(5)),
        evaluation(2, 0.2),
        evaluation(5, 0.5),
        {"kind": "summary", "time": 0.0, "run/steps": 5},
        train(2, 12.0, note="second"),
        train(3, 24.0, note="second"),
    )
    write(
        tmp_path / "ledger.jsonl",
        *(trained(step, (0, 5)) for step in range(5)),
        {"kind": "resume", "step": 2},
        trained(2, (1, 7)),
    )
    run = load_run(tmp_path)
    assert [(row["train/step"], row["note"]) for row in run.train] == [
        (0, "first"),
        (1, "first"),
        (2, "second"),
        (3, "second"),
    ]
    assert [row["eval/weight_version"] for row in run.evals] == [2]
    assert run.summary == {}
    assert [(t.step, t.staleness, t.tokens) for t in run.trained] == [(0, 0, 5), (1, 0, 5), (2, 1, 7)]
    # 50 s of the first attempt lie before the second one's 12 s and 24 s.
    assert [row["run/seconds"] for row in run.train] == [10.0, 20.0, 62.0, 74.0]


def test_a_late_evaluation_of_an_older_version_is_kept_in_its_place(tmp_path: Path) -> None:
    """F29, on the reading side."""
    write(tmp_path / "metrics.jsonl", train(0, 1.0), evaluation(7, 0.7), evaluation(5, 0.5), train(1, 2.0))
    assert [row["eval/weight_version"] for row in load_run(tmp_path).evals] == [5, 7]


def test_nulls_are_no_points(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(0, 1.0, loss=None), train(1, 2.0, loss=0.5), train(2, 3.0))
    assert series(load_run(tmp_path).train, "train/step", "loss") == ([1.0], [0.5])


def test_a_violation_in_the_ledger_is_counted(make_run: Callable[..., Path]) -> None:
    folder = make_run("demo", steps=6)
    path = folder / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    step_five = next(line for line in lines if line["kind"] == "trained" and line["step"] == 5)
    step_five["trajectories"][0]["min"] = 0  # 5 versions behind at η = 1
    write(path, *lines)
    audit = load_run(folder).audit
    assert audit.violations is not None
    assert audit.violations >= 1


def test_a_ledger_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", train(0, 1.0))
    (tmp_path / "ledger.jsonl").write_text("")
    audit = load_run(tmp_path).audit
    assert audit.violations != 0
