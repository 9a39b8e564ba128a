"""Output that nobody reads to its end, as under `| head`: silence, and the exit code of a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from staleflow.cli.failures import says_what_went_wrong
from staleflow.errors import EXIT_CLOSED_PIPE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("command", [["config"], ["experiment", "--help"]])
def test_a_closed_pipe_is_no_error_to_talk_about(command: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "staleflow.cli", *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        check=False,
    )
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == (EXIT_CLOSED_PIPE if command == ["config"] else 1)  # help is the parser's own


def test_another_pipe_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise BrokenPipeError("a worker's")

    with pytest.raises(typer.Exit) as caught:
        says_what_went_wrong(command)()
    assert caught.value.exit_code == 1
    assert "BrokenPipeError: a worker's" in capsys.readouterr().err
