"""A run, or several, as one offline HTML file, as a table on the terminal, and as JSON."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from staleflow.errors import RunFolderError
from staleflow.reporting.comparison import (
    KEY_MEASURES,
    TOKENS,
    ComparedCell,
    against,
    as_json,
    audit_text,
    compare,
)
from staleflow.reporting.format import times
from staleflow.reporting.groups import RunGroup, group_runs
from staleflow.reporting.load import RunData, load_run
from staleflow.reporting.page import page

SIDE_BY_SIDE = 5
"""Up to this many groups are columns of the terminal's table; more are rows."""


def write_report(run_folders: Sequence[Path], output: Path) -> None:
    """Write the report of these runs to `output`, whole or not at all.

    Raises RunFolderError if a folder is not a run folder, none is given, or the file cannot be written.
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
    """Return the comparison, and a line on the bottleneck of each group, for a Rich console.

    A few groups stand side by side as columns, which fits 80 columns; more are rows.
    """
    groups = group_runs(_load(run_folders))
    lines = []
    for group in groups:
        remark = f" ({group.remark})" if group.remark else ""
        lines.append(Text.assemble((f"{group.label}  ", "bold"), group.verdict.text, remark))
        for run, n in zip(group.runs, group.numbers, strict=True):
            if n.tokens is not None and n.tokens.missing:
                lines.append(Text(f"{run.name}  tokens do not balance: {n.tokens.missing:+,}", "red"))
    return Group(_side_by_side(groups) if len(groups) <= SIDE_BY_SIDE else _rows(groups), *lines)


def comparison(run_folders: Sequence[Path]) -> dict[str, Any]:
    """Return the comparison as plain values, ready for JSON. Raises RunFolderError, as write_report."""
    return as_json(group_runs(_load(run_folders)))


def terminal_summary(run_folders: Sequence[Path], *, width: int = 100) -> str:
    """Return the summary as plain text of at most `width` columns."""
    target = io.StringIO()
    Console(file=target, width=width, color_system=None, highlight=False).print(
        summary_renderable(run_folders)
    )
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()).strip("\n") + "\n"


def _load(run_folders: Sequence[Path]) -> list[RunData]:
    if not run_folders:
        raise RunFolderError("no run is given: give at least one run folder, such as runs/<name>")
    return [load_run(folder) for folder in run_folders]


def _side_by_side(groups: Sequence[RunGroup]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for group in groups:
        table.add_column(Text(group.label, "bold"), justify="right", overflow="fold")
    table.add_row(Text("runs", "dim"), *(str(len(group.runs)) for group in groups))
    for row in compare(groups):
        measure = row.measure
        if measure.brief:
            title = f"{measure.title} tokens" if measure.section == TOKENS else measure.title
            table.add_row(Text(title, "dim"), *map(_cell, row.cells))
        if measure.name == "trained_tokens_per_s" and (relative := against(groups)):
            table.add_row(Text(f"against {relative[0]}", "dim"), *map(times, relative[1]))
    table.add_row(Text("audit", "dim"), *map(_audit, groups))
    return table


def _rows(groups: Sequence[RunGroup]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("", style="bold", overflow="fold")
    rows = [row for row in compare(groups) if row.measure.name in KEY_MEASURES]
    for row in rows:
        table.add_column(row.measure.title, justify="right")
    table.add_column("audit")
    for place, group in enumerate(groups):
        table.add_row(Text(group.label), *(_cell(row.cells[place]) for row in rows), _audit(group))
    return table


def _cell(cell: ComparedCell) -> Text:
    """The median, bold if it is the best of its row; below it, the least and the most of the seeds."""
    return Text.assemble(
        (cell.text, "bold green" if cell.best else ""), (f"\n{cell.span}" if cell.span else "", "dim")
    )


def _audit(group: RunGroup) -> Text:
    text, clean = audit_text(group)
    return Text(text, {None: "dim", True: "green", False: "red"}[clean])
