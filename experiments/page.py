"""A study's result as markdown, as JSON, and on the terminal."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from staleflow.experiments.study import Finding, Result, Study, Table

_VERDICTS = {True: "reached", False: "missed", None: ""}


def to_json(study: Study, result: Result) -> str:
    """One JSON object."""
    findings = [
        {
            "name": f.name,
            "value": f.value,
            "unit": f.unit,
            "goal": f.goal,
            "wanted": f.wanted if f.goal is not None else None,
            "reached": f.reached,
            "note": f.note,
        }
        for f in result.findings
    ]
    tables = [
        {"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows], "note": t.note}
        for t in result.tables
    ]
    document: dict[str, Any] = {
        "study": study.name,
        "machine": _machine(),
        "findings": findings,
        "tables": tables,
        "notes": list(result.notes),
    }
    return json.dumps(document, indent=1)


def to_markdown(study: Study, result: Result) -> str:
    """A page that stands by itself next to its figures."""
    lines = [f"# {study.name}", "", study.question, "", f"Measured on {_machine()}.", ""]
    rows = [(f.name, _with_unit(f), _goal(f), _VERDICTS[f.reached], f.note) for f in result.findings]
    lines += _markdown_table(("figure", "measured", "goal", "verdict", "how"), rows)
    for name in result.figures:
        lines += ["", f"![{name}]({name})"]
    for table in result.tables:
        cells = [tuple(_cell(value) for value in row) for row in table.rows]
        lines += ["", f"## {table.title}", "", *_markdown_table(table.columns, cells)]
        lines += ["", table.note] if table.note else []
    lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"


def save(study: Study, result: Result, folder: Path) -> Path:
    """Write page, figures and JSON; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in result.figures.items():
        (folder / name).write_text(svg, encoding="utf-8")
    (folder / f"{study.name}.json").write_text(to_json(study, result) + "\n", encoding="utf-8")
    page = folder / f"{study.name}.md"
    page.write_text(to_markdown(study, result), encoding="utf-8")
    return page


def print_result(study: Study, result: Result) -> None:
    """Tables on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    shown = RichTable(title=f"{study.name}: {study.question}", title_justify="left")
    for column in ("figure", "measured", "goal", "verdict"):
        shown.add_column(column, justify="left" if column in ("figure", "verdict") else "right")
    styles = {True: "green", False: "red", None: ""}
    for f in result.findings:
        verdict = f"[{styles[f.reached]}]{_VERDICTS[f.reached]}[/]" if f.reached is not None else ""
        shown.add_row(f.name, _with_unit(f), _goal(f), verdict)
    console.print(shown)
    for table in result.tables:
        console.print(_rich(table, RichTable))
    for note in result.notes:
        console.print(f"- {note}")


WIDEST = 8
"""Columns that a terminal has room for; a wider table is shown on its side."""


def _rich(table: Table, kind: Any) -> Any:
    shown = kind(title=table.title, title_justify="left", caption=table.note or None, caption_justify="left")
    lines = [tuple(table.columns), *(tuple(map(_cell, row)) for row in table.rows)]
    if len(table.columns) > WIDEST:
        lines = list(zip(*lines, strict=True))
    for at, column in enumerate(lines[0]):
        shown.add_column(column, justify="right", no_wrap=at > 0)
    for line in lines[1:]:
        shown.add_row(*line)
    return shown


def _markdown_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with_unit(finding: Finding) -> str:
    return f"{_cell(finding.value)} {finding.unit}".strip()


def _goal(finding: Finding) -> str:
    if finding.goal is None:
        return ""
    return f"{'≤' if finding.wanted == 'at most' else '≥'} {_cell(finding.goal)} {finding.unit}".strip()


def _machine() -> str:
    return f"{_processor()}, Python {platform.python_version()}, {platform.system()}"


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
