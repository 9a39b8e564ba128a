"""The `staleflow` command: version, and the commands in the order in which --help lists them."""

from __future__ import annotations

from typing import Annotated

import typer

import staleflow
from staleflow.cli.measuring_commands import experiment, plan, profile
from staleflow.cli.reading_commands import audit, explain, report, trace
from staleflow.cli.run_commands import run, simulate, sweep
from staleflow.cli.setup_commands import config, metrics, model

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for _command in (
    run,
    simulate,
    sweep,
    profile,
    plan,
    report,
    explain,
    trace,
    audit,
    experiment,
    model,
    config,
    metrics,
):
    app.command()(_command)


def main() -> None:
    """Entry point of the console script."""
    app()
