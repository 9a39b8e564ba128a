"""`staleflow report`, `explain`, `trace` and `audit`: what reads run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from staleflow.cli.arguments import Debug
from staleflow.cli.failures import says_what_went_wrong
from staleflow.errors import EXIT_AUDIT_VIOLATION, RunFolderError, UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]

_MARKS = ("ledger.jsonl", "metrics.jsonl", "config.yaml", "checkpoints")
"""A folder with any of these is a run's; without its ledger the audit of it is a violation."""


@says_what_went_wrong
def report(
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="HTML file; default: report.html in one run's folder, comparison.html here for several.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the figures as JSON; the HTML file only where --output says so."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Write one offline HTML file about one run, or several side by side, and print a summary.

    Runs that differ only in run.seed are one column: the median, and the least and the most.
    """
    target = output or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    from staleflow.reporting.report import comparison, terminal_summary, write_report

    if output is not None and output.is_file() and not _is_html(output):
        raise UserError(
            f"{output} exists and is not an HTML file, so it is not overwritten: choose another --output"
        )
    if as_json:
        figures = comparison(runs)
        if output is not None:
            write_report(runs, output)
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        return 0
    write_report(runs, target)
    print(terminal_summary(runs))
    print(f"report: {target}")
    return 0


@says_what_went_wrong
def explain(
    run: Run,
    what: Annotated[
        list[str], typer.Argument(metavar="TRAJECTORY|step N", help="Id of a trajectory or group, or a step.")
    ],
    debug: Debug = False,
) -> int:
    """Show what happened to a trajectory, or what a training step waited for."""
    from staleflow.reporting.explain import explain as explained

    print(explained(run, " ".join(what)))
    return 0


@says_what_went_wrong
def trace(
    run: Run,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSON file; default: trace.json in the run's folder."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Write the run's journal as a trace for ui.perfetto.dev or chrome://tracing."""
    from staleflow.reporting.trace import trace_run

    target = output or run / "trace.json"
    print(f"trace: {target} ({trace_run(run, target):,} events)")
    return 0


@says_what_went_wrong
def audit(runs: Runs, debug: Debug = False) -> int:
    """Check each run's ledger by itself; exit code 3 when anything breaks the rules."""
    from staleflow.audit import audit_ledger

    code = 0
    for run in runs:
        if not run.exists():
            raise RunFolderError(f"there is no run folder {run}")
        if run.is_dir() and not any((run / name).exists() for name in _MARKS):
            raise RunFolderError(f"{run} is not a run: it has none of {', '.join(_MARKS)}")
        result = audit_ledger(run)
        print(f"{run}\n{result.text()}")
        if not result.ok:
            code = EXIT_AUDIT_VIOLATION
    return code


def _is_html(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html"))
