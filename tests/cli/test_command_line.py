"""The command line: what it prints, what it returns, and that it starts nothing on wrong input."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import staleflow
from staleflow.cli.main import app
from staleflow.config import Config, load_config
from staleflow.coordination.events import DrawnGroup, GroupsDrawn
from staleflow.errors import RunFailed, RunFolderError
from staleflow.protocol.records import Start
from staleflow.storage import LedgerWriter
from staleflow.telemetry.events import EventStream, WeightsPushed
from staleflow.telemetry.journal import JournalWriter

Launched = list[tuple[Config, bool, bool]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Calls of `launch`, which does nothing here but return what was put into `launch.outcome`."""
    calls: Launched = []

    def launch(config: Config, *, resume: bool, clean: bool) -> int:
        calls.append((config, resume, clean))
        outcome = config.data.options.get("outcome", 0)
        if isinstance(outcome, int):
            return outcome
        raise {"user": RunFolderError, "run": RunFailed, "bug": ZeroDivisionError}[outcome]("it broke\nbadly")

    module = types.ModuleType("staleflow.runtime.launch")
    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "staleflow.runtime.launch", module)
    return calls


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_version() -> None:
    assert call("--version").stdout == f"staleflow {staleflow.__version__}\n"


def test_a_dry_run_prints_a_config_that_reads_back_and_starts_nothing(
    launched: Launched, tmp_path: Path
) -> None:
    result = call("run", "staleness.bound=2", "--dry-run")
    assert result.exit_code == 0
    path = tmp_path / "c.yaml"
    path.write_text(result.stdout)
    assert load_config([path]) == load_config([], ["staleness.bound=2"])
    assert launched == []


def test_run_hands_over_files_overrides_and_switches(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {seed: 5, steps: 7}\n")
    assert call("run", str(tmp_path / "c.yaml"), "run.steps=9", "--resume").exit_code == 0
    ((config, resume, clean),) = launched
    assert (config.run.seed, config.run.steps, resume, clean) == (5, 9, True, False)


def test_a_bare_run_uses_the_defaults(launched: Launched) -> None:
    assert call("run").exit_code == 0
    assert launched == [(Config(), False, False)]


def test_the_environment_counts(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALEFLOW__RUN__STEPS", "3")
    call("run")
    assert launched[0][0].run.steps == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "staleness.eat=2"),
        ("run", "nope.yaml"),
        ("run", "--resume", "--clean"),
        ("sweep",),
        ("sweep", "--eta", "0,-1"),
        ("sweep", "--axis", "staleness.eat=1,2"),
        ("sweep", "--axis", "staleness.bound"),
        ("sweep", "--axis", "staleness.bound="),
        ("sweep", "--eta", "1,1"),
        ("sweep", "--eta", "1,2", "--axis", "staleness.bound=3"),
        ("report", "nowhere"),
        ("audit", "nowhere"),
        ("explain", "nowhere", "step", "3"),
        ("trace", "nowhere"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(
    launched: Launched, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("staleflow: ")
    assert result.stderr.count("\n") == 1
    assert launched == []
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_axis_says_what_was_meant() -> None:
    """F32"""
    assert (
        "did you mean staleness.bound (also called eta)?" in call("sweep", "--axis", "staleness.eat=1").stderr
    )


def test_explain_takes_ids_and_steps_and_trace_writes_its_file(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal.jsonl")
    stream = EventStream([journal])
    stream.tell(WeightsPushed(version=0, seconds=0.0))
    drawn = DrawnGroup(group_id="g", members=("g-m0", "g-m1"), prompt_length=9)
    stream.tell(GroupsDrawn(groups=(drawn,)))
    journal.close()
    assert call("explain", str(tmp_path), "g-m1").stdout.startswith("trajectory g-m1 of group g\n")
    assert call("explain", str(tmp_path), "g").stdout.startswith("group g: 2 trajectories, never reserved\n")
    for step in (("step", "0"), ("step=0",), ("step 0",)):
        assert call("explain", str(tmp_path), *step).stdout.startswith("step 0 has not been handed out")
    assert call("explain", str(tmp_path), "g-m2").exit_code == 2
    assert call("trace", str(tmp_path)).exit_code == 0
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize(
    ("outcome", "code", "message"),
    [
        ("0", 0, ""),
        ("130", 130, ""),
        ("user", 2, "staleflow: it broke\nbadly\n"),
        ("run", 1, "staleflow: the run failed: it broke\nbadly\n"),
        ("bug", 1, "staleflow: ZeroDivisionError: it broke (traceback in "),
    ],
)
def test_outcomes_become_exit_codes(launched: Launched, outcome: str, code: int, message: str) -> None:
    result = call("run", f"data.options.outcome={outcome}")
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr
    if outcome == "bug":
        log = Path(result.stderr.partition("traceback in ")[2].partition(";")[0])
        assert "ZeroDivisionError: it broke" in log.read_text()
        log.unlink()


def test_debug_shows_the_traceback(launched: Launched) -> None:
    result = call("run", "data.options.outcome=bug", "--debug")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr


def test_audit_returns_3_for_an_empty_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    assert call("audit", str(tmp_path)).exit_code == 3


def test_config_prints_every_key_with_its_meaning(tmp_path: Path) -> None:
    text = call("config").stdout
    (tmp_path / "c.yaml").write_text(text)
    assert load_config([tmp_path / "c.yaml"]) == Config()
    assert "# η: the most weight versions" in text


def test_report_writes_where_it_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    start = Start(bound=1, batch_size=1, group_size=1, last_batch="train", spare_limit=0)
    with LedgerWriter(run / "ledger.jsonl") as ledger:
        ledger.append(start, 0, 0)
    result = call("report", str(run), "--output", str(tmp_path / "r.html"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "r.html").read_text().lstrip().lower().startswith("<!doctype html")


def test_report_as_json_prints_nothing_else_and_writes_only_where_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "demo"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"kind": "train", "train/step": 0, "run/seconds": 2.0}\n')
    result = call("report", str(run), "--json")
    assert result.exit_code == 0
    (group,) = json.loads(result.stdout)["groups"]
    assert (group["label"], group["figures"]["steps_per_s"]["median"]) == ("demo", 0.5)
    assert [path.name for path in tmp_path.rglob("*.html")] == []
    assert call("report", str(run), "--json", "-o", "r.html").exit_code == 0
    assert (tmp_path / "r.html").is_file()


def test_a_report_overwrites_nothing_but_html(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"kind":"event"}\n')
    result = call("report", str(tmp_path), "-o", str(tmp_path / "metrics.jsonl"))
    assert result.exit_code == 2
    assert "is not an HTML file, so it is not overwritten" in result.stderr
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind":"event"}\n'
    assert call("report", str(tmp_path)).exit_code == 0
    assert call("report", str(tmp_path)).exit_code == 0  # over its own


def test_an_audit_tells_a_folder_that_is_no_run_from_a_run_without_its_ledger(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = call("audit", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a run: it has none of ledger.jsonl" in result.stderr
    (tmp_path / "metrics.jsonl").write_text("")
    assert call("audit", str(tmp_path)).exit_code == 3
