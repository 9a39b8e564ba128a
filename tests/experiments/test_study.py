"""What a study comes back with: verdicts by the goal, one page, one JSON object, one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from staleflow.cli.main import app
from staleflow.errors import ConfigError
from staleflow.experiments.page import to_json, to_markdown
from staleflow.experiments.study import STUDIES, Finding, Options, Result, Study, Table, load_study

SEEN: list[Options] = []


def script(options: Options) -> Result:
    SEEN.append(options)
    options.say("looking")
    return Result(
        findings=(
            Finding(name="time", value=21.0, unit="ms", goal=20.0),
            Finding(name="rate", value=1234567.0, unit="/s", goal=1000.0, wanted="at least", note="median"),
            Finding(name="size", value=0.25, unit="GB"),
        ),
        tables=(Table(title="Sizes", columns=("n", "ms"), rows=((16, 0.5), (1024, 21.0)), note="by hand"),),
        figures={"one.svg": "<svg/>"},
        notes=("A made-up study.",),
    )


STUDY = Study(name="made-up", question="Does it say what it found?", script=script)


def test_a_finding_knows_whether_its_goal_was_reached() -> None:
    assert [f.reached for f in script(Options(quick=True, run=None, say=print)).findings] == [
        False,
        True,
        None,
    ]
    assert Finding(name="x", value=20.0, unit="", goal=20.0).reached
    assert Finding(name="x", value=20.0, unit="", goal=20.0, wanted="at least").reached


def test_the_page_shows_what_was_missed_as_well_as_what_was_reached() -> None:
    page = to_markdown(STUDY, script(Options(quick=True, run=None, say=print)))
    assert "| time | 21 ms | ≤ 20 ms | missed |  |" in page
    assert "| rate | 1,234,567 /s | ≥ 1,000 /s | reached | median |" in page
    assert "| size | 0.25 GB |  |  |  |" in page
    assert "| 1,024 | 21 |" in page
    assert "![one.svg](one.svg)" in page


def test_json_has_every_figure_unrounded() -> None:
    document = json.loads(to_json(STUDY, script(Options(quick=True, run=None, say=print))))
    assert [f["reached"] for f in document["findings"]] == [False, True, None]
    assert document["findings"][1]["value"] == 1234567.0
    assert document["tables"][0]["rows"][1] == {"n": 1024, "ms": 21.0}


def test_the_command_writes_page_figures_and_json_and_prints_the_verdicts(tmp_path: Path) -> None:
    arguments = ["experiment", f"{__name__}.STUDY", "--quick", "--run", "somewhere", "-o", str(tmp_path)]
    result: Any = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert SEEN[-1].quick
    assert SEEN[-1].run == Path("somewhere")
    assert "missed" in result.stdout
    assert result.stderr == "made-up: looking\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made-up.json", "made-up.md", "one.svg"]


def test_with_json_nothing_else_is_on_standard_output(tmp_path: Path) -> None:
    result: Any = CliRunner().invoke(app, ["experiment", f"{__name__}.STUDY", "--json", "-o", str(tmp_path)])
    assert json.loads(result.stdout)["study"] == "made-up"
    assert not SEEN[-1].quick


@pytest.mark.parametrize("name", STUDIES)
def test_every_declared_study_loads_under_its_name(name: str) -> None:
    assert load_study(name).name == name


def test_what_is_no_study_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a study"):
        load_study("staleflow.experiments.study.STUDIES")
    with pytest.raises(ConfigError, match="did you mean overhead"):
        load_study("overhed")


def test_a_file_where_the_folder_should_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.md"
    file.write_text("mine")
    SEEN.clear()
    for output in (file, file / "below"):
        result = CliRunner().invoke(app, ["experiment", "test_study.STUDY", "-o", str(output)])
        assert result.exit_code == 2
        assert result.stderr == f"staleflow: {file} is a file, and the study's page needs a folder: " + (
            "choose another --output\n"
        )
    assert SEEN == []
    assert file.read_text() == "mine"
