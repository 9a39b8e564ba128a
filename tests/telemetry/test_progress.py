"""A simulated run's progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from staleflow.telemetry.console import NullConsole, PlainConsole
from staleflow.telemetry.progress import ProgressConsole, make_progress
from staleflow.telemetry.rows import Row, RunStatus


def status(version: int) -> RunStatus:
    return RunStatus(
        run_name="s", policy="staleflow", bound=1, step=version + 1, steps=40, version=version,
        phase="running", seconds=3723.0 * version / 3, tokens_per_s=12_345.0,
    )  # fmt: skip


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=160, color_system=None), out


def test_the_bar_shows_step_simulated_time_speed_and_rate() -> None:
    console, out = terminal()
    shown = make_progress("auto", console=console)
    assert isinstance(shown, ProgressConsole)
    for version in (-1, 1, 3):
        shown.update(status(version))
    shown.close()
    shown.close()
    last = out.getvalue()
    for part in ("s · staleflow, η 1", "3/40", "simulated 1:02:03", "x real time", "12.3k tok/s"):
        assert part in last


def test_only_what_matters_scrolls_by_above_it() -> None:
    console, out = terminal()
    shown = make_progress("live", console=console)
    for name, text in (("instance_up", "i0 is up"), ("instance_down", "i0 was lost: scripted outage")):
        shown.row(Row(kind="event", time=0.0, values={"event/name": name, "event/text": text}))
    shown.row(Row(kind="train", time=0.0, values={"train/step": 7}))
    shown.close()
    assert "instance_down: i0 was lost: scripted outage" in out.getvalue()
    assert "i0 is up" not in out.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind"), [("auto", PlainConsole), ("plain", PlainConsole), ("off", NullConsole)]
)
def test_without_a_terminal_it_is_lines_or_nothing(mode: str, kind: type) -> None:
    console = Console(file=io.StringIO(), width=100)
    assert isinstance(make_progress(mode, console=console), kind)  # type: ignore[arg-type]
