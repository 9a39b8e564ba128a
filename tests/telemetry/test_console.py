"""The live picture at several sizes, the plain lines, and who gets which console."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from staleflow.telemetry import panels
from staleflow.telemetry.console import LiveConsole, NullConsole, Picture, PlainConsole, make_console
from staleflow.telemetry.rows import BufferStatus, InstanceStatus, Row, RunStatus


def status(instances: int = 3, **changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run_name": "demo",
        "policy": "staleflow",
        "bound": 1,
        "step": 10,
        "steps": 40,
        "version": 10,
        "phase": "running",
        "seconds": 100.0,
        "buffers": (
            BufferStatus(step=10, capacity=16, reserved=4, occupied=8),
            BufferStatus(step=11, capacity=16, reserved=2, occupied=0),
        ),
        "instances": tuple(
            InstanceStatus(
                instance=f"i{n}",
                version=10 - n % 2,
                running=n + 1,
                waiting=0,
                kv_usage=0.5,
                tokens_per_s=1000.0 - n,
                state="decoding",
            )
            for n in range(instances)
        ),
        "trainer": "waiting for a batch",
        "waiting_for": "step 10 waits for 4 groups on i1",
        "pending": 3,
        "scoring": 2,
        "in_flight": 24,
        "tokens_per_s": 2997.0,
        "staleness_max": 1,
        "staleness_mean": 0.25,
        "reward_mean": (0.5, 0.6, 0.7),
        "evals": ((0, 0.5), (5, 0.625)),
        "tokens": {
            "generated": 1000,
            "trained": 700,
            "filtered": 200,
            "aborted": 50,
            "discarded": 0,
            "in_flight": 50,
        },
    }
    return RunStatus(**{**values, **changes})


def screen(width: int, height: int, *statuses: RunStatus) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        highlight=False,
    )
    picture = Picture()
    for item in statuses:
        picture.update(item)
    with console.capture() as capture:
        console.print(picture)
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (100, 30), (120, 24), (160, 45)])
@pytest.mark.parametrize("instances", [0, 1, 4, 40])
def test_the_picture_fits_the_terminal_at_every_size(width: int, height: int, instances: int) -> None:
    lines = screen(width, height, status(instances))
    assert len(lines) < height
    assert max(len(line) for line in lines) <= width


@pytest.mark.parametrize("width", [80, 120, 160])
def test_everything_worth_knowing_is_in_the_picture(width: int) -> None:
    text = "\n".join(screen(width, 40, status()))
    for needle in (
        "demo",
        "staleflow",
        "η 1",
        "v10",
        "running",
        "10/40",
        "25%",
        "1:40",
        "step 10",
        "8+4",
        "of 16",
        "step 11",
        "0+2",
        "i0",
        "v9",
        "50%",
        "2,997 tok/s",
        "0.25 max 1",
        "0.700",
        "0.625 v5 +0.125",
        "waits for 4 groups on i1",
        "waiting for a batch",
        "3 pending",
        "24 in flight",
        "2 being scored",
        "trained 70%",
        "filtered 20%",
    ):
        assert needle in text, needle


def test_many_instances_become_one_line_and_the_slowest_few() -> None:
    text = "\n".join(screen(120, 40, status(40)))
    assert "slowest 4 of 40" in text
    assert "all 40" in text
    assert "v9-10" in text
    assert "40 decoding" in text
    # Instance n makes 1000 - n tokens a second, so the last ones are the slowest.
    assert [name for name in ("i39", "i38", "i37", "i36", "i35", "i0 ") if name in text] == [
        "i39",
        "i38",
        "i37",
        "i36",
    ]


def test_a_picture_of_a_run_that_has_done_nothing_yet() -> None:
    empty = RunStatus(
        run_name="r", policy="p", bound=0, step=0, steps=0, version=0, phase="starting", seconds=0.0
    )
    text = "\n".join(screen(80, 24, empty))
    assert "starting" in text
    assert "none has joined yet" in text
    assert "after the first step" in text


def test_a_picture_before_the_first_status() -> None:
    assert screen(80, 24) == ["starting …"]


def test_names_with_markup_are_shown_as_they_are() -> None:
    assert "[red]x[/red]" in "\n".join(screen(80, 24, status(run_name="[red]x[/red]")))


def test_the_time_left_is_measured_from_where_a_resumed_run_started() -> None:
    first, now = status(step=10, seconds=5.0), status(step=15, seconds=15.0)
    # 5 steps in 10 s; 25 steps are left.
    assert panels.eta_seconds(first, now) == 50.0
    assert panels.eta_seconds(first, first) is None


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ((), 5, ""),
        ((1.0,), 5, "▁"),
        ((0.0, 1.0), 5, "▁█"),
        ((0.0, 0.0, 1.0, 1.0), 2, "▁█"),
        ((0.0, float("nan"), 7.0), 9, "▁█"),
    ],
)
def test_sparkline(values: tuple[float, ...], width: int, expected: str) -> None:
    assert panels.sparkline(values, width) == expected


def test_a_bar_is_never_longer_than_its_width_and_shows_little_as_something() -> None:
    assert panels.bar(10, (0.01, "a", ""), (0.5, "b", "")).plain == "abbbbb····"
    assert panels.bar(4, (0.9, "a", ""), (0.9, "b", "")).plain == "aaaa"


@pytest.mark.parametrize(
    ("number", "text"), [(950, "950"), (1234, "1,234"), (12345, "12.3k"), (4_560_000, "4.56M")]
)
def test_count(number: float, text: str) -> None:
    assert panels.count(number) == text


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(
        file=out, width=100, height=40, force_terminal=True, color_system=None, highlight=False
    ), out


def pipe() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60, force_terminal=False, highlight=False), out


def test_auto_is_live_on_a_terminal_and_plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    live = make_console("auto", console=terminal()[0])
    live.close()
    assert isinstance(live, LiveConsole)
    assert isinstance(make_console("auto", console=pipe()[0]), PlainConsole)
    assert isinstance(make_console("plain", console=terminal()[0]), PlainConsole)
    assert isinstance(make_console("off"), NullConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_console("auto", console=terminal()[0]), PlainConsole)


TRAIN = Row(
    kind="train",
    time=0.0,
    values={
        "train/step": 3,
        "run/seconds": 75.0,
        "staleness/max": 1,
        "staleness/mean": 0.25,
        "rollout/reward_mean": 0.625,
        "timing_s/wait_for_batch": 0.5,
    },
)
EVAL = Row(
    kind="eval",
    time=0.0,
    values={"eval/weight_version": 4, "eval/heldout/avg@1": 0.5, "eval/heldout/prompts": 500},
)
EVENT = Row(kind="event", time=0.0, values={"event/name": "verifier killed", "event/text": "[bold]over 5 s"})
SUMMARY = Row(
    kind="summary", time=0.0, values={"run/steps": 40, "run/seconds": 120.0, "run/reason": "completed"}
)


def test_plain_is_one_line_a_step_an_evaluation_and_an_event() -> None:
    console, out = pipe()
    plain = PlainConsole(console)
    plain.update(status(phase="starting", seconds=2.0))
    plain.update(status(phase="running"))
    for row in (TRAIN, EVAL, Row(kind="instances", time=0.0, values={"run/seconds": 1.0}), EVENT, SUMMARY):
        plain.row(row)
    plain.close()
    assert out.getvalue().splitlines() == [
        "demo: policy staleflow, η 1, 40 steps",
        "starting at 0:02",
        "step 3/40  staleness 1 (mean 0.25)  reward 0.625  waited 0.50 s  at 1:15",
        "eval v4  heldout/avg@1 0.500",
        "verifier killed: [bold]over 5 s",
        "done: 40 steps in 2:00 (completed)",
    ]


def test_live_keeps_evaluations_and_events_above_the_picture_and_closes_twice() -> None:
    console, out = terminal()
    live = LiveConsole(console)
    live.update(status())
    for row in (TRAIN, EVAL, EVENT):
        live.row(row)
    live.close()
    live.close()
    text = out.getvalue()
    assert "eval v4  heldout/avg@1 0.500" in text
    assert "verifier killed: [bold]over 5 s" in text
    assert "step 3/40" not in text
    last = text[text.rindex("staleness buffers") :]
    assert "waiting for a batch" in last


def test_off_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console("off")
    console.update(status())
    console.row(TRAIN)
    console.close()
    assert capsys.readouterr() == ("", "")
