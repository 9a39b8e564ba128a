"""The person's view of a run: a live picture on a terminal, one line a step elsewhere, or nothing.

- A console only looks: it never changes what it is shown, and needs no clock (times come from
  statuses and rows).
- `update` replaces the picture; `row` is something worth keeping and is printed for good
  (evaluations and events everywhere, training steps where there is no picture).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Literal, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from staleflow.telemetry import panels
from staleflow.telemetry.catalogue import CATALOGUE, find
from staleflow.telemetry.rows import Row, RunStatus

ConsoleMode = Literal["auto", "live", "plain", "off"]

WIDE = 116
"""From this many columns on, panels stand side by side."""


class RunConsole(Protocol):
    """What the runtime tells a person."""

    def update(self, status: RunStatus) -> None:
        """Show the picture of this moment."""
        ...

    def row(self, row: Row) -> None:
        """Show something that happened."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was, with the last picture standing; may be called twice."""
        ...


def make_console(mode: ConsoleMode, *, console: Console | None = None) -> RunConsole:
    """Return the console for `mode`; `auto` is live on a terminal that can move its cursor, else plain."""
    console = Console(highlight=False) if console is None else console
    if mode == "auto":
        mode = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    if mode == "live":
        return LiveConsole(console)
    return PlainConsole(console) if mode == "plain" else NullConsole()


class NullConsole:
    """Says nothing."""

    def update(self, status: RunStatus) -> None:
        """Ignore."""

    def row(self, row: Row) -> None:
        """Ignore."""

    def close(self) -> None:
        """Do nothing."""


class PlainConsole:
    """One line a step, an evaluation, an event and a change of phase: for logs, pipes and CI."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: RunStatus | None = None

    def update(self, status: RunStatus) -> None:
        """Print a line when the phase changes; keep the rest for the lines of steps."""
        before = self._status
        self._status = status
        if before is None:
            self._print(f"{status.run_name}: policy {status.policy}, η {status.bound}, {status.steps} steps")
        if (before is None or before.phase != status.phase) and status.phase != "running":
            self._print(f"{status.phase} at {panels.duration(status.seconds)}")

    def row(self, row: Row) -> None:
        """Print the line of a train, eval, event or summary row."""
        line = _train_line(row, self._status) if row.kind == "train" else _kept_line(row)
        if line is not None:
            self._print(line)

    def close(self) -> None:
        """Do nothing: every line is out already."""

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveConsole:
    """A picture redrawn a few times a second; evaluations and events scroll by above it."""

    def __init__(self, console: Console, *, refresh_per_second: float = 4.0) -> None:
        self._console = console
        self._picture = Picture()
        self._live = Live(
            self._picture, console=console, refresh_per_second=refresh_per_second, vertical_overflow="crop"
        )
        self._live.start()

    def update(self, status: RunStatus) -> None:
        """Show this status from the next refresh on."""
        self._picture.update(status)

    def row(self, row: Row) -> None:
        """Print evaluations, events and the summary above the picture."""
        line = _kept_line(row)
        if line is not None:
            self._console.print(Text(line, no_wrap=True, overflow="ellipsis", style=_style(row)))

    def close(self) -> None:
        """Draw the last picture and give the terminal back; may be called twice."""
        if self._live.is_started:
            self._live.stop()


class Picture:
    """The newest status as one renderable, fitted to the console's size at every draw."""

    def __init__(self) -> None:
        self._first: RunStatus | None = None
        self._status: RunStatus | None = None

    def update(self, status: RunStatus) -> None:
        """Draw this status from now on; the pace is measured from the first one shown."""
        self._first = status if self._first is None else self._first
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the most that fits: side by side where wide, else stacked; framed where there is room."""
        first, status = self._first, self._status
        if first is None or status is None:
            yield Text("starting …", style="dim")
            return
        width, height = options.max_width, console.size.height - 1  # the last line belongs to the cursor
        options = options.update(height=None)
        head = panels.header(status, width, panels.eta_seconds(first, status))
        rows = _wide if width >= WIDE else _narrow
        framed = list(rows(status, width, console, options, True))
        tight = height < len(framed) + 3
        lines = list(rows(status, width, console, options, False)) if tight else framed
        yield head
        for line in lines[: max(0, height - 3)]:
            yield from line
            yield Segment.line()


Lines = Iterator[list[Segment]]


def _wide(status: RunStatus, width: int, console: Console, options: ConsoleOptions, framed: bool) -> Lines:
    widths = (width // 2, width - width // 2)
    left_inner, right_inner = (w - 4 for w in widths)
    for pair in (
        (panels.buffers(status, left_inner), panels.instances(status, right_inner)),
        (panels.learning(status, left_inner), panels.flow(status, right_inner)),
    ):
        sized = [options.update(width=w) for w in widths]
        blocks = list(zip(pair, sized, strict=True))
        height = max(len(_draw(block, console, size, framed)) for block, size in blocks)
        columns = [_draw(block, console, size, framed, height) for block, size in blocks]
        for left, right in zip_longest(*columns, fillvalue=[Segment(" " * widths[0])]):
            yield [*left, *right]


def _narrow(status: RunStatus, width: int, console: Console, options: ConsoleOptions, framed: bool) -> Lines:
    for part in (panels.buffers, panels.instances, panels.flow, panels.learning):
        yield from _draw(part(status, width - 4), console, options, framed)


def _draw(
    block: panels.Block, console: Console, options: ConsoleOptions, framed: bool, height: int | None = None
) -> list[list[Segment]]:
    return console.render_lines(block.panel(height) if framed else block.ruled(), options)


def _train_line(row: Row, status: RunStatus | None) -> str:
    steps = f"/{status.steps}" if status is not None else ""
    parts = [f"step {row.values.get('train/step', '?')}{steps}", *_labelled(row)]
    if "run/seconds" in row.values:
        parts.append(f"at {panels.duration(float(row.values['run/seconds']))}")
    return "  ".join(parts)


def _labelled(row: Row) -> Iterator[str]:
    """The metrics of a train row that the catalogue has a label for; a maximum with its mean."""
    for metric in CATALOGUE.values():
        if not metric.label or row.kind not in metric.kinds or metric.name not in row.values:
            continue
        mean = metric.name.removesuffix("/max") + "/mean"
        beside = f" (mean {CATALOGUE[mean].text(row.values[mean])})" if mean in row.values else ""
        yield f"{metric.label} {metric.text(row.values[metric.name])}{beside}"


def _kept_line(row: Row) -> str | None:
    v = row.values
    if row.kind == "eval":
        shown = [(name, metric) for name in v if (metric := find(name)) is not None and metric.label]
        scores = [f"{name.removeprefix('eval/')} {metric.text(v[name])}" for name, metric in shown]
        return f"eval v{v.get('eval/weight_version', '?')}  " + "  ".join(scores)
    if row.kind == "event":
        return f"{v.get('event/name', 'event')}: {v.get('event/text', '')}"
    if row.kind == "summary":
        at = panels.duration(float(v.get("run/seconds", 0.0)))
        return f"done: {v.get('run/steps', '?')} steps in {at} ({v.get('run/reason', 'no reason given')})"
    return None


def _style(row: Row) -> str:
    return {"eval": "magenta", "event": "yellow"}.get(row.kind, "bold green")
