"""A person's view of a simulated run: a progress bar on a terminal, one line a step elsewhere, or nothing."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from staleflow.telemetry import panels
from staleflow.telemetry.console import ConsoleMode, RunConsole, make_console
from staleflow.telemetry.rows import Row, RunStatus

KEPT_EVENTS = ("warning", "gave_up", "instance_down", "finish")
"""Events worth a line above the bar; metrics.jsonl has all."""


def make_progress(mode: ConsoleMode, *, console: Console | None = None) -> RunConsole:
    """The console of a simulated run: where a real one would be live, a progress bar."""
    console = Console(highlight=False) if console is None else console
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return ProgressConsole(console)
    return make_console("plain" if mode == "auto" else mode, console=console)


class _SpeedColumn(ProgressColumn):
    """Simulated seconds in one real second."""

    def render(self, task: Task) -> Text:
        """Draw it."""
        elapsed = task.finished_time if task.finished else task.elapsed
        if not elapsed:
            return Text("")
        return Text(f"{panels.count(task.fields['simulated'] / elapsed)} x real time", style="dim")


class ProgressConsole:
    """Simulated step and time, the speed, and generated tokens a second."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("simulated {task.fields[clock]}"),
            _SpeedColumn(),
            TextColumn("{task.fields[rate]}", style="dim"),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None, simulated=0.0, clock="0:00", rate="")
        self._progress.start()

    def update(self, status: RunStatus) -> None:
        """Show this status from the next refresh on."""
        self._progress.update(
            self._task,
            description=f"{status.run_name} · {status.policy}, η {status.bound}",
            total=status.steps,
            completed=max(0, status.version),
            simulated=status.seconds,
            clock=panels.duration(status.seconds),
            rate=f"{panels.count(status.tokens_per_s)} {panels.RATE_UNIT}",
        )

    def row(self, row: Row) -> None:
        """Print what is worth a line above the bar."""
        if row.kind == "event" and row.values.get("event/name") in KEPT_EVENTS:
            text = f"{row.values['event/name']}: {row.values.get('event/text', '')}"
            self._progress.console.print(Text(text, style="yellow"))

    def close(self) -> None:
        """Leave the bar as it stands; may be called twice."""
        self._progress.stop()
