"""`staleflow plan`: how to use a number of GPUs, by bounds and short simulations, as a table and a config
overlay.

Invariant: what can be refused is refused before anything is simulated, and an existing file is never replaced
without --force.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from staleflow.config import Config
from staleflow.config.yaml_text import dump
from staleflow.errors import UserError
from staleflow.runtime.assembly import opening_record
from staleflow.runtime.assembly.simulated import StopAfter, run_simulation, simulated_control
from staleflow.runtime.start import first_start
from staleflow.simulation.bounds import SIDES
from staleflow.simulation.hardware import cluster_settings
from staleflow.simulation.planning import (
    ENOUGH,
    Candidate,
    Layout,
    Outcome,
    Outcomes,
    choose,
    find_candidates,
    most_seconds,
    outcome_of,
    search,
    simulated_steps,
    with_layout,
)
from staleflow.storage.cost_file import check_target

MANY_STEPS = 1_000_000
"""More than a short simulation can do: it ends by its time."""


def run_plan(
    config: Config,
    *,
    gpus: int,
    bounds: Sequence[int],
    budget: int,
    at_once: int,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Search, print, write. Returns the exit code. Raises UserError."""
    if output is not None:
        check_target(output, force=force)
    candidates = find_candidates(config, gpus, bounds)
    outcomes = _simulated(config, candidates, budget=budget, at_once=at_once)
    chosen = choose(outcomes)
    by_layout = {candidate.layout: candidate for candidate in candidates}
    if as_json:
        print(json.dumps(_figures(by_layout, outcomes, chosen), indent=2))
    else:
        console = Console()
        console.print(_table(config, gpus, by_layout, outcomes, chosen))
        print(_words(by_layout[chosen], outcomes, len(candidates)))
    if output is not None:
        output.write_text(overlay(config, by_layout[chosen], outcomes[chosen]), encoding="utf-8")
        if not as_json:
            print(f"saved: {output} (staleflow simulate CONFIG {output})")
    return 0


def read_bounds(text: str) -> list[int]:
    """Staleness bounds written as `1,2,3`. Raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"--eta is {text!r}, not a list of whole numbers of at least 0 such as 1,2,3")
    return sorted({int(part) for part in parts})


def simulate_candidate(config: Config, candidate: Candidate) -> Outcome:
    """A short simulation of the config on a candidate's layout, under its policy. Raises UserError or
    RunFailed."""
    config = with_layout(config, candidate.layout)
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": MANY_STEPS})})
    opening, settings = opening_record(config), cluster_settings(config)
    result = run_simulation(
        simulated_control(config, settings, first_start(opening)),
        settings,
        steps=config.run.steps,
        opening=opening,
        listeners=[StopAfter(simulated_steps(candidate), at_once=True)],
        max_seconds=most_seconds(candidate),
    )
    return outcome_of(result, opening.bound)


def _simulated(config: Config, candidates: Sequence[Candidate], *, budget: int, at_once: int) -> Outcomes:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    pool = _pool(at_once) if at_once > 1 else None
    one = partial(simulate_candidate, config)
    with pool or nullcontext(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=min(budget, len(candidates)))

        def tracked(chosen: Sequence[Candidate]) -> list[Outcome]:
            progress.update(task, description=f"simulating {_name(chosen[0].layout)}")
            outcomes = []
            for outcome in (pool.map if pool else map)(one, chosen):
                outcomes.append(outcome)
                progress.advance(task)
            return outcomes

        return search(candidates, tracked, budget=budget, at_once=at_once)


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


# ---------------------------------------------------------------------- what is printed


def _name(layout: Layout) -> str:
    return (
        f"{_gpus(layout.rollout_gpus)} for rollout, {layout.tensor_parallel} an instance, "
        f"{layout.training_gpus} for training, η = {layout.bound}"
    )


def _gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def _table(
    config: Config, gpus: int, candidates: Mapping[Layout, Candidate], outcomes: Outcomes, chosen: Layout
) -> Table:
    simulation, data = config.simulation, config.data
    table = Table(
        title=f"{simulation.model} on {gpus} {simulation.gpu}, {data.batch_size} x {data.group_size} "
        f"trajectories a step, policy {config.coordination.policy}",
        caption="GPUs: instances x those of each + training; tokens/s: generated tokens trained on, from a "
        "short simulation; bound: what no policy exceeds, and which side sets it; idle: share of the time; "
        ">: the choice",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("GPUs", "η", "tokens/s", "s a\nstep", "of\nbound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("side", no_wrap=True)
    for column in ("stale-\nness", "trainer\nidle", "inst.\nidle"):
        table.add_column(column, justify="right", no_wrap=True)
    for layout, outcome in sorted(outcomes.items(), key=lambda i: (i[0].bound, -i[1].tokens_per_s)):
        bounds, instances = candidates[layout].bounds, candidates[layout].instances
        table.add_row(
            f"{'> ' if layout == chosen else ''}{instances} x {layout.tensor_parallel} + "
            f"{layout.training_gpus}",
            str(layout.bound),
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.step_s:,.0f}",
            f"{outcome.tokens_per_s / bounds.least:.0%}",
            bounds.binding,
            f"{outcome.staleness_mean:.2f}",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.instances_idle:.0%}",
            style="bold" if layout == chosen else None,
        )
    return table


def _words(chosen: Candidate, outcomes: Outcomes, of: int) -> str:
    layout, bounds = chosen.layout, chosen.bounds
    most = max(outcome.tokens_per_s for outcome in outcomes.values())
    share = outcomes[layout].tokens_per_s / most
    why = "the fastest"
    if share < 1:
        why = f"{share:.1%} of the fastest, with the least η that has {ENOUGH:.0%}"
    return (
        f"{_name(layout)}: {why}. Bounds: rollout {bounds.rollout:,.0f}, trainer {bounds.trainer:,.0f}, "
        f"latency {bounds.latency:,.0f} tokens/s. {len(outcomes)} of {of} layouts were simulated, those that "
        "promise most."
    )


def _figures(candidates: Mapping[Layout, Candidate], outcomes: Outcomes, chosen: Layout) -> dict[str, Any]:
    rows = [
        {
            **asdict(layout),
            **asdict(outcome),
            "instances": candidates[layout].instances,
            "kv_capacity": candidates[layout].kv_capacity,
            "bounds": {side: candidates[layout].bounds.rate(side) for side in SIDES},
            "side": candidates[layout].bounds.binding,
            "of_bound": outcome.tokens_per_s / candidates[layout].bounds.least,
        }
        for layout, outcome in outcomes.items()
    ]
    return {"chosen": asdict(chosen), "simulated": rows, "candidates": len(candidates)}


# ---------------------------------------------------------------------- the overlay


def overlay(config: Config, chosen: Candidate, outcome: Outcome) -> str:
    """The plan as a config file to be laid over the one that was planned for."""
    layout, bounds, simulation = chosen.layout, chosen.bounds, config.simulation
    values = {
        "staleness": {"bound": layout.bound},
        "data": {"batch_size": config.data.batch_size, "group_size": config.data.group_size},
        "rollout": {
            "instances": chosen.instances,
            "kv_capacity_tokens": chosen.kv_capacity,
            "max_running": config.rollout.max_running,
        },
        "coordination": {"policy": config.coordination.policy},
        "simulation": {
            "model": simulation.model,
            "gpu": simulation.gpu,
            "rollout_gpus": layout.rollout_gpus,
            "tensor_parallel": layout.tensor_parallel,
            "training_gpus": layout.training_gpus,
        },
    }
    gpus = layout.rollout_gpus + layout.training_gpus
    return (
        f"# Made by `staleflow plan` for {simulation.model} on {gpus} {simulation.gpu}.\n"
        f"# Predicted: {outcome.tokens_per_s:,.0f} trained tokens/s, {outcome.step_s:,.0f} s a step, "
        f"{outcome.tokens_per_s / bounds.least:.0%} of the bound\n"
        f"# (side: {bounds.binding}), staleness {outcome.staleness_mean:.2f} on average.\n"
        "#\n"
        "# Lay it over the config that it was made for: staleflow simulate CONFIG THIS_FILE, or run.\n"
        "# A run reads all but the section simulation. It has no keys for these, which are the engine's and "
        f"the\n# trainer's own: {_gpus(layout.tensor_parallel)} an instance, training on "
        f"{layout.training_gpus} GPUs.\n{dump(values)}"
    )
