"""`staleflow profile`, `plan` and `experiment`: what measures or predicts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from staleflow.cli.arguments import AsJson, ConfigArguments, Debug, Force, command_config
from staleflow.cli.failures import says_what_went_wrong


@says_what_went_wrong
def profile(
    arguments: ConfigArguments = None,
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
    force: Force = False,
    debug: Debug = False,
) -> int:
    """Measure what decoding costs on the config's engine, and fit the cost model that routing uses."""
    from staleflow.cli.profile import run_profile

    config = command_config(arguments)
    return run_profile(config, output, repeats=repeats, force=force, cpu_time=cpu_time)


@says_what_went_wrong
def plan(
    arguments: ConfigArguments = None,
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
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Find how to divide GPUs between rollout and training, and which staleness bound to take."""
    from staleflow.cli.plan import read_bounds, run_plan
    from staleflow.runtime.preflight import prepare_plan

    config = command_config(arguments, simulated=True)
    prepare_plan(config)
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


@says_what_went_wrong
def experiment(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="overhead, fidelity, throughput, scaling, ablation, convergence, engines, whole-step, "
            "simulator, protocol, weights, or the dotted path of a Study of your own.",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a minute to see that everything works.")
    ] = False,
    as_json: AsJson = False,
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
