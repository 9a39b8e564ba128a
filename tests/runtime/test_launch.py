"""What `staleflow run` does around a session: rows to the sinks, the last words, the exit code."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from toy import toy_config

from staleflow.errors import EXIT_FAILED, ConfigError, RunFailed, RunFolderError
from staleflow.reporting.explain import explain
from staleflow.runtime.interrupts import Interrupts
from staleflow.runtime.launch import _watch, launch
from staleflow.telemetry.console import make_console
from staleflow.telemetry.rows import Row, RunStatus


class FailingSession:
    """Fails at once; its reason is told in a row that nobody has taken yet."""

    def __init__(self) -> None:
        self._rows = [Row(kind="event", time=0.0, values={"event/name": "instance_down", "event/text": "i0"})]

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        rows, self._rows = self._rows, []
        return rows, None

    def request_stop(self) -> None: ...

    def outcome(self) -> str | None:
        raise RunFailed("every rollout instance failed")

    def close(self) -> None: ...


class ListSink:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None: ...


def test_the_rows_before_a_failure_are_kept() -> None:
    sink = ListSink()
    with pytest.raises(RunFailed, match="every rollout instance failed"):
        _watch(FailingSession(), Interrupts(), make_console("off"), sink)
    assert [row.values["event/name"] for row in sink.rows] == ["instance_down"]


def test_a_run_that_only_filters_says_why_it_ended(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F26: a run that ends early without training must not look like a success."""
    config = toy_config(model, tmp_path, "reward.verifier=toy.always_one", "data.max_filtered_batches=2")
    assert launch(config, resume=False, clean=False) == EXIT_FAILED
    assert "2 batches of groups in a row taught nothing" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["run/reason"] == "filtered_out"


def test_a_shared_memory_folder_that_is_none_is_refused_before_anything_starts(
    model: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    config = toy_config(
        model, tmp_path, "cluster.runtime=ray", f"cluster.shared_memory_dir={missing}", "rollout.engine=fake"
    )
    with pytest.raises(ConfigError, match=r"cluster\.shared_memory_dir is '.*missing', which is not a wri"):
        launch(config, resume=False, clean=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=nowhere.Engine", "rollout engine 'nowhere.Engine' cannot be loaded"),
        ("rollout.engine=os.path", "rollout engine 'os.path' is neither a class nor a function"),
        ("training.trainer=nowhere.Trainer", "trainer 'nowhere.Trainer' cannot be loaded"),
        ("rollout.max_model_len=512", "rollout.max_model_len is 512, but the model reads at most 256 tokens"),
        ("data.options.terms=3", r"data\.options\.terms is not an option of the data source 'sums'"),
        ("data.prompt_column=problem", r"data\.prompt_column is set"),
        ("model.tokenizer=/nowhere", "tokenizer folder '/nowhere' does not exist"),
    ],
)
def test_what_the_config_names_is_looked_at_before_anything_starts(
    model: Path, tmp_path: Path, override: str, message: str
) -> None:
    config = toy_config(model, tmp_path, override)
    with pytest.raises(ConfigError, match=message):
        launch(config, resume=False, clean=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_files_is_evaluated_on_its_held_out_file(model: Path, tmp_path: Path) -> None:
    """What the README says about your own data: `data.options` reach the source."""
    for name, count in (("train", 8), ("test", 5)):
        lines = [json.dumps({"problem": f"{n}+1=", "answer": str(n + 1)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = toy_config(
        model,
        tmp_path,
        "run.steps=1",
        "data.source=jsonl",
        f"data.path={tmp_path}/train.jsonl",
        "data.prompt_column=problem",
        "data.size=null",
        f"data.options.held_out_path={tmp_path}/test.jsonl",
        "evaluation.every=1",
    )
    assert launch(config, resume=False, clean=False) == 0
    rows = [json.loads(line) for line in (tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()]
    assert {row["eval/heldout/prompts"] for row in rows if row["kind"] == "eval"} == {5}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ValueError("x")])
def test_a_full_disk_is_said_in_a_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr("staleflow.runtime.launch._to_the_end", fails)
    with pytest.raises(RunFailed if isinstance(error, OSError) else ValueError) as caught:
        launch(toy_config(model, tmp_path), resume=False, clean=False)
    assert ("no space left" in str(caught.value)) is isinstance(error, OSError)


def test_a_run_leaves_a_journal_and_a_trace_and_a_resumed_one_goes_on_in_them(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "toy"
    assert launch(toy_config(model, tmp_path, "run.steps=2"), resume=False, clean=False) == 0
    before = (folder / "journal.jsonl").read_bytes()
    assert launch(toy_config(model, tmp_path, "run.steps=4"), resume=True, clean=False) == 0
    assert (folder / "journal.jsonl").read_bytes().startswith(before)
    names = [event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert {"update 0", "update 3", "attempt 1 begins with step 2"} <= set(names)
    assert explain(folder, "step 1").startswith("step 1: 3 groups, 9 trajectories")
    assert explain(folder, "step 3").startswith("step 3 of attempt 1: 3 groups, 9 trajectories")


def test_without_a_journal_there_is_no_trace_and_explain_says_what_to_set(
    model: Path, tmp_path: Path
) -> None:
    config = toy_config(model, tmp_path, "run.steps=1", "telemetry.journal=false")
    assert launch(config, resume=False, clean=False) == 0
    assert {p.name for p in (tmp_path / "toy").iterdir()} >= {"ledger.jsonl", "report.html"}
    assert not [p for p in (tmp_path / "toy").iterdir() if p.name in ("journal.jsonl", "trace.json")]
    with pytest.raises(RunFolderError, match=r"telemetry\.journal"):
        explain(tmp_path / "toy", "step 0")
