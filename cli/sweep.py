"""`staleflow sweep`: every combination of some values, one `staleflow run` (or `simulate`) each, compared.

Invariants: all combinations are checked before the first one starts; a run that ended by itself is never run
again, and never passes for one with another config; one that fails does not stop the others.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from staleflow.config import Config, load_config
from staleflow.config.layers import split_arguments
from staleflow.config.yaml_text import dump_scalar, parse
from staleflow.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, UserError
from staleflow.storage.run_folder import checked_path, config_differences

_DONE_REASONS = ("completed", "exhausted", "filtered_out")
"""End reasons that resuming would not change; an interrupted run is not done."""
_OWN_KEYS = {"run.name": "--name", "run.output_dir": "--output-dir"}
"""Keys that a sweep sets itself, and the option that says how."""
_MAY_DIFFER = ("run.name", "run.output_dir", "telemetry")
"""Where a finished run may differ from what is asked for now and still count as done."""
_SHORT_NAMES = {"staleness.bound": "eta"}
"""Axes with a name of their own in run names; others go by the last part of their key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One combination."""

    label: str
    """`eta=1`, or `eta=1,learning_rate=0.001`."""
    folder: Path
    arguments: tuple[str, ...]
    """What follows `staleflow run`, or `staleflow simulate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """All runs of a sweep, and where the comparison goes."""

    runs: tuple[SweepRun, ...]
    folder: Path
    simulate: bool = False


def plan_sweep(
    arguments: Sequence[str],
    axes: Sequence[str],
    *,
    name: str,
    output_dir: str | None,
    environ: Mapping[str, str],
    simulate: bool = False,
) -> SweepPlan:
    """Every combination of the axes (`key=v1,v2`), each with its config checked. Raises UserError."""
    from staleflow.runtime.preflight import prepare_sweep

    if not axes:
        raise UserError("a sweep needs --eta 0,1,2, --seeds 0,1,2 or --axis key=v1,v2")
    files, overrides = split_arguments(arguments)
    if output_dir is not None:
        overrides.append(f"run.output_dir={json.dumps(output_dir)}")
    pipe = next((file for file in files if not file.is_file()), None)
    if pipe is not None:
        raise UserError(f"a sweep reads its config once for each run, so {pipe} must be a file, not a pipe")
    checked = set()
    values = [_axis(text) for text in axes]
    keys = [key for key, _ in values]
    for key in [*keys, *(text.partition("=")[0] for text in arguments)]:
        if key == "run.name" or (key in _OWN_KEYS and key in keys):
            raise UserError(f"a sweep sets {key} of each run itself: use {_OWN_KEYS[key]}")
    if len(set(keys)) < len(keys):
        raise UserError(f"the axis {next(k for k in keys if keys.count(k) > 1)} is given twice")
    runs = []
    for combination in itertools.product(*(texts for _, texts in values)):
        pairs = list(zip(keys, combination, strict=True))
        label = ",".join(f"{_SHORT_NAMES.get(k, k.rpartition('.')[2])}={_in_a_name(v)}" for k, v in pairs)
        chosen = [*overrides, *(f"{k}={v}" for k, v in pairs), f"run.name={json.dumps(f'{name}/{label}')}"]
        config = load_config(files, chosen, environ, simulated=simulate)
        output = Path(config.run.output_dir)
        folder = checked_path(output, f"{name}/{label}")
        # The preflight reads neither name nor bound: combinations that differ in nothing else have one.
        read = config.model_dump_json(exclude={"run": {"name", "steps"}, "staleness": True})
        if is_done(folder):
            _check_agreement(folder, config, simulate)
        elif read not in checked:
            prepare_sweep(config, simulated=simulate)
            checked.add(read)
        runs.append(
            SweepRun(
                label=label,
                folder=folder,
                arguments=(*map(str, files), *chosen),
            )
        )
    if len({run.folder for run in runs}) < len(runs):
        raise UserError("two combinations of the sweep have the same name: give each value once")
    return SweepPlan(runs=tuple(runs), folder=output / name, simulate=simulate)


def run_sweep(plan: SweepPlan, *, resume: bool) -> int:
    """Run what is not done yet, write the comparison, and return the exit code (1 when any run failed)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    failed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as progress:
        task = progress.add_task("sweep", total=len(plan.runs))
        for run in plan.runs:
            progress.update(task, description=run.label)
            if is_done(run.folder):
                progress.console.print(f"{run.label}: done already")
            else:
                again = resume and (run.folder / "ledger.jsonl").is_file()
                code = _simulate_one(run, again=again) if plan.simulate else _run_one(run, resume=again)
                if code == EXIT_INTERRUPTED:
                    return EXIT_INTERRUPTED
                progress.console.print(
                    f"{run.label}: {'done' if code == 0 else f'failed (exit code {code})'}"
                )
                failed += [run.label] if code else []
            progress.advance(task)
    _compare(plan)
    if failed:
        print(
            f"staleflow: {len(failed)} of {len(plan.runs)} runs failed: {', '.join(failed)}", file=sys.stderr
        )
    return EXIT_FAILED if failed else 0


def is_done(folder: Path) -> bool:
    """Whether the run in `folder` ended by itself: its ledger's last whole line is an `end` that says so."""
    try:
        lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    except OSError:
        return False
    whole = [line for line in lines[-2:] if line.endswith(b"\n")]
    try:
        last = json.loads(whole[-1]) if whole else {}
    except ValueError:
        return False
    return last.get("kind") == "end" and last.get("reason") in _DONE_REASONS


def _check_agreement(folder: Path, config: Config, simulate: bool) -> None:
    """Raise UserError when a finished run has another config than is asked for, or is of the other kind."""
    if (folder / "simulation.json").is_file() != simulate:
        kind = "real" if simulate else "simulated"
        raise UserError(f"the finished run in {folder} is a {kind} one: choose another --name")
    differing = config_differences(
        folder / "config.yaml", config.model_dump(mode="json"), except_in=_MAY_DIFFER
    )
    if differing:
        raise UserError(
            f"the finished run in {folder} had another {', '.join(differing)}: choose another --name, or "
            "give the old values"
        )


def _run_one(run: SweepRun, *, resume: bool) -> int:
    # The live view and the progress bar cannot share the terminal: one line a step instead.
    return _start("run", run, "plain", ["--resume"] if resume else [])


def _simulate_one(run: SweepRun, *, again: bool) -> int:
    # A simulated run is short and cannot be resumed: one that did not end starts again.
    return _start("simulate", run, "off", ["--clean"] if again else [])


def _start(command: str, run: SweepRun, console: str, options: list[str]) -> int:
    # -P: a checkout in the working directory would hide the installed package and has no staleflow.cli.
    arguments = [sys.executable, "-P", "-m", "staleflow.cli", command, *run.arguments, *options]
    if not any(argument.startswith("telemetry.console=") for argument in run.arguments):
        arguments.append(f"telemetry.console={console}")
    return subprocess.run(arguments, check=False).returncode


def _compare(plan: SweepPlan) -> None:
    folders = [run.folder for run in plan.runs if (run.folder / "metrics.jsonl").is_file()]
    if not folders:
        return
    from staleflow.reporting.report import terminal_summary, write_report

    target = plan.folder / "report.html"
    write_report(folders, target)
    print(terminal_summary(folders))
    print(f"comparison: {target}")


def _axis(text: str) -> tuple[str, list[str]]:
    """Key and YAML values of `key=v1,v2`; commas inside brackets and quotes do not separate."""
    key, equals, listed = text.partition("=")
    values = parse(f"[{listed}]", f"--axis {key}", origin="from the sweep").values if equals else None
    if not key or not values:
        raise ConfigError(f"{text!r} is not an axis: write --axis key=v1,v2")
    return key, [dump_scalar(value) for value in values]


def _in_a_name(value: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", value).lstrip(".") or "_"
