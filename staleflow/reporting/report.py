"""A run, or several, as one offline HTML file and as a table on the terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from staleflow.errors import RunFolderError
from staleflow.reporting.headline import Headline, bottleneck, headline
from staleflow.reporting.load import RunData, load_run
from staleflow.reporting.page import page
from staleflow.reporting.words import COLUMNS, best_of, cells

SIDE_BY_SIDE = 4
"""Up to this many runs are columns of the terminal's table, beyond it rows."""


def write_report(run_folders: Sequence[Path], output: Path) -> None:
    """Write the report of these runs to `output`, whole or not at all.

    Raises RunFolderError where a folder holds no run, none is given, or the file cannot be written.
    """
    text = page(_load(run_folders))
    aside = output.with_name(f".{output.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, output)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the report {output}: {error.strerror}; choose another file"
        ) from error


def summary_renderable(run_folders: Sequence[Path]) -> RenderableType:
    """Return the comparison and one line a run on what held it up, for a Rich console.

    A few runs stand side by side as columns, which fits 80 columns; more are rows.
    """
    runs = _load(run_folders)
    numbers = [headline(run) for run in runs]
    lines = []
    for run, n in zip(runs, numbers, strict=True):
        lines.append(Text.assemble((f"{run.name}  ", "bold"), bottleneck(n)))
        if n.tokens is not None and n.tokens.missing:
            lines.append(Text(f"{run.name}  tokens do not balance: {n.tokens.missing:+,}", "red"))
    return Group(_side_by_side(runs, numbers) if len(runs) <= SIDE_BY_SIDE else _rows(runs, numbers), *lines)


def terminal_summary(run_folders: Sequence[Path], *, width: int = 100) -> str:
    """Return the same as plain text of at most `width` columns."""
    target = io.StringIO()
    Console(file=target, width=width, color_system=None, highlight=False).print(
        summary_renderable(run_folders)
    )
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()).strip("\n") + "\n"


def _load(run_folders: Sequence[Path]) -> list[RunData]:
    if not run_folders:
        raise RunFolderError("no run to report on: give at least one run folder, such as runs/<name>")
    return [load_run(folder) for folder in run_folders]


def _side_by_side(runs: Sequence[RunData], numbers: Sequence[Headline]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(Text(run.name, "bold"), justify="right", overflow="fold")
    columns = [_cells(runs, numbers, i) for i in range(len(runs))]
    for name, *texts in zip((*COLUMNS, "audit"), *columns, strict=True):
        table.add_row(Text(name, "dim"), *texts)
    return table


def _rows(runs: Sequence[RunData], numbers: Sequence[Headline]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("run", style="bold", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("audit")
    for i, run in enumerate(runs):
        table.add_row(Text(run.name), *_cells(runs, numbers, i))
    return table


def _cells(runs: Sequence[RunData], numbers: Sequence[Headline], place: int) -> list[Text]:
    """Return the texts of one run, the best of a column in bold, the audit's verdict last."""
    best = best_of(numbers)
    values = zip(COLUMNS, cells(numbers[place]), strict=True)
    texts = [Text(value, "bold green" if best.get(name) == place else "") for name, value in values]
    verdict = runs[place].verdict
    style = "dim" if verdict.violations is None else "red" if verdict.violations else "green"
    return [*texts, Text(verdict.text, style)]
