"""From a config to a finished run folder: what `staleflow run` does.

Order: preflight, run folder, start, watch, end. Ctrl-C once finishes the step, saves and writes the report;
twice stops now. Either way no process is left.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from staleflow.config.schema import Config
from staleflow.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, RunFailed
from staleflow.runtime.assembly import (
    build_inline_session,
    build_ray_session,
    build_sinks,
    opening_record,
)
from staleflow.runtime.interrupts import Interrupts
from staleflow.runtime.preflight import ReadyRun, prepare_run
from staleflow.runtime.session import Session
from staleflow.runtime.start import RunPaths, StartPoint, first_start, resumed_start
from staleflow.storage.provenance import provenance
from staleflow.storage.run_folder import RunFolder
from staleflow.telemetry.console import RunConsole, make_console
from staleflow.telemetry.jsonl import JsonlSink
from staleflow.telemetry.rows import Row
from staleflow.telemetry.sinks import Fanout, Sink
from staleflow.telemetry.wandb import open_wandb

LOOK_EVERY_S = 0.25
"""The console is redrawn four times a second."""
TRACE_AT_END_BYTES = 128 * 2**20
"""A journal of this size takes about half a minute; a command that is over should not take longer to end."""
ALL_FILTERED = (
    "the run ended early: {} batches of groups in a row taught nothing, because the members of each had "
    "the same reward or none at all; see data.max_filtered_batches and training.dynamic_sampling"
)


def launch(config: Config, *, resume: bool, clean: bool) -> int:
    """Run to the end; returns the exit code. Raises UserError before the run folder exists, or RunFailed."""
    ready = prepare_run(config, resume=resume, clean=clean)
    for note in ready.data.notes:
        print(f"note: {note}", file=sys.stderr)
    with ready.cluster or nullcontext(), run_folder(config, resume=resume, clean=clean) as folder:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})
        start = _start_point(config, folder, resume=resume)
        folder.write_config(config.to_yaml(), provenance())
        paths = RunPaths(
            name=folder.name,
            ledger=folder.ledger.resolve(),
            checkpoints=folder.checkpoints.resolve(),
            logs=folder.logs.resolve(),
            journal=folder.journal.resolve() if config.telemetry.journal else None,
        )
        console = make_console(config.telemetry.console)
        reason = watched(lambda: _start_session(config, ready, start, paths), config, folder, console)
    return say_how_it_ended(config, folder, reason)


def say_how_it_ended(config: Config, folder: RunFolder, reason: str) -> int:
    """The last lines of the command; returns the exit code."""
    print(f"run folder: {folder.path}\nreport:     {folder.report}")
    if reason == "filtered_out":
        print(ALL_FILTERED.format(config.data.max_filtered_batches), file=sys.stderr)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if reason == "interrupted" else EXIT_OK


@contextmanager
def run_folder(config: Config, *, resume: bool, clean: bool) -> Iterator[RunFolder]:
    """The run's folder, held until the end."""
    folder = RunFolder.create(
        Path(config.run.output_dir),
        config.run.name,
        now=time.time(),
        seed=config.run.seed,
        resume=resume,
        clean=clean,
    )
    with folder:
        yield folder


def _start_point(config: Config, folder: RunFolder, *, resume: bool) -> StartPoint:
    if resume:
        return resumed_start(opening_record(config), folder.ledger, folder.checkpoints)
    return first_start(opening_record(config))


def _start_session(config: Config, ready: ReadyRun, start: StartPoint, paths: RunPaths) -> Session:
    if ready.cluster is None:
        return build_inline_session(config, ready.data, start, paths)
    return build_ray_session(config, ready.cluster, start, paths)


# ---------------------------------------------------------------------- watching


def watched(
    start_session: Callable[[], Session], config: Config, folder: RunFolder, console: RunConsole
) -> str:
    """Run a session to its end, its rows into the folder and to the console; then report and trace.

    Returns the finish reason; raises what ended the run, if it failed.
    """
    try:
        return _to_the_end(start_session, console, _open_sinks(config, folder, console))
    except Exception as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise RunFailed(
            f"there is no space left where {folder.path} is: make room, and go on with --resume"
        ) from error
    finally:
        _write_report(folder.path, folder.report)
        if config.telemetry.journal:
            _write_trace(folder.journal, folder.trace)


def _to_the_end(start_session: Callable[[], Session], console: RunConsole, sinks: Sink) -> str:
    session: Session | None = None
    with Interrupts() as interrupts:  # around the end, too: a late Ctrl-C must not leave processes behind
        try:
            session = start_session()
            return _watch(session, interrupts, console, sinks)
        except StoppedNow:
            return "interrupted"
        finally:
            if session is not None:
                session.close()
            sinks.close()
            console.close()


def _watch(session: Session, interrupts: Interrupts, console: RunConsole, sinks: Sink) -> str:
    asked = False
    while True:
        reason, failure = None, None
        try:
            reason = session.outcome()  # before the look, so that the look after the end misses nothing
        except Exception as error:
            failure = error
        rows, status = session.look(LOOK_EVERY_S)
        for row in rows:
            sinks.write(row)
            console.row(row)
        if status is not None:
            if asked and status.phase == "running":
                status = replace(status, phase="finishing step")
            console.update(status)
        if failure is not None:
            raise failure
        if reason is not None:
            return reason
        if interrupts.count and not asked:
            asked = True
            session.request_stop()
            print("finishing the step; Ctrl-C again stops now", file=sys.stderr)
        if interrupts.count > 1:
            raise StoppedNow


class StoppedNow(Exception):
    """The person pressed Ctrl-C twice."""


# ---------------------------------------------------------------------- sinks and report


def _open_sinks(config: Config, folder: RunFolder, console: RunConsole) -> Fanout:
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    wandb = config.telemetry.wandb

    def warn(text: str) -> None:
        row = Row(kind="event", time=time.time(), values={"event/name": "warning", "event/text": text})
        sinks[0].write(row)
        console.row(row)

    # A resumed run goes on in its W&B run, where W&B can (offline it begins another folder of the same id).
    known_id = folder.wandb_id.read_text(encoding="utf-8") if folder.wandb_id.is_file() else None
    opened = open_wandb(
        mode=wandb.mode,
        project=wandb.project,
        entity=wandb.entity,
        run_name=folder.name,
        folder=folder.path,
        config=config.model_dump(mode="json"),
        resume_id=known_id,
        warn=warn,
    )
    if opened is not None:
        folder.wandb_id.write_text(opened.run_id, encoding="utf-8")
        sinks.append(opened)
    sinks += build_sinks(config, warn)
    return Fanout(sinks)


def _write_report(folder: Path, target: Path) -> None:
    """The report is written even when the run failed; a report that fails must not hide why."""
    from staleflow.reporting.report import terminal_summary, write_report

    try:
        write_report([folder], target)
        print(terminal_summary([folder]))
    except Exception as error:
        print(f"the report could not be written: {error}", file=sys.stderr)


def _write_trace(journal: Path, target: Path) -> None:
    """As with the report: a trace that fails must not hide why the run did."""
    from staleflow.reporting.trace import write_trace

    try:
        if not journal.is_file():
            return  # it ended before its loop began
        if journal.stat().st_size > TRACE_AT_END_BYTES:
            print(
                f"the journal is large, so trace.json was not made: `staleflow trace {target.parent}` does it"
            )
            return
        write_trace(journal, target)
    except Exception as error:
        print(f"the trace could not be written: {error}", file=sys.stderr)
