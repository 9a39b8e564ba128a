"""`staleflow run`, `simulate` and `sweep`: what makes run folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from staleflow.cli.arguments import ConfigArguments, Debug, command_config
from staleflow.cli.failures import says_what_went_wrong
from staleflow.errors import UserError

if TYPE_CHECKING:
    from staleflow.config import Config

Clean = Annotated[bool, typer.Option("--clean", help="Remove the earlier run of that name first.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the resolved config and every problem that the run would have."),
]


@says_what_went_wrong
def run(
    arguments: ConfigArguments = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint of run.name.")
    ] = False,
    clean: Clean = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> int:
    """Train. Without arguments: the built-in task with a tiny model, a few minutes on two cores."""
    config = command_config(arguments)
    if resume and clean:
        raise UserError("--resume and --clean exclude each other: one keeps the earlier run, one removes it")
    if dry_run:
        from staleflow.runtime.preflight import run_problems

        return _dry_run(config, run_problems(config, resume=resume, clean=clean))
    from staleflow.runtime.launch import launch

    return launch(config, resume=resume, clean=clean)


@says_what_went_wrong
def simulate(
    arguments: ConfigArguments = None,
    clean: Clean = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> int:
    """Run the config on simulated machines (see its section simulation): the same run folder, in minutes."""
    config = command_config(arguments, simulated=True)
    if dry_run:
        from staleflow.runtime.preflight import simulation_problems

        return _dry_run(config, simulation_problems(config, clean=clean))
    from staleflow.runtime.launch_simulation import simulate_run

    return simulate_run(config, clean=clean)


@says_what_went_wrong
def sweep(
    arguments: ConfigArguments = None,
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
        typer.Option(
            "--resume", help="Continue runs that were started earlier; finished ones are always skipped."
        ),
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option("--simulate", help="On simulated machines, as `simulate`; unfinished runs start again."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Run every combination of values over a shared config, one by one, and compare them in one report."""
    from staleflow.cli.sweep import plan_sweep, run_sweep

    axes = ([f"staleness.bound={eta}"] if eta is not None else []) + (axis or [])
    axes += [f"run.seed={seeds}"] if seeds is not None else []
    planned = plan_sweep(
        arguments or [], axes, name=name, output_dir=output_dir, environ=os.environ, simulate=simulated
    )
    return run_sweep(planned, resume=resume)


def _dry_run(config: Config, problems: Sequence[str]) -> int:
    """Print the config, and the problems as notes on stderr: the run may be meant for another machine."""
    print(config.to_yaml(), end="")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0
