"""`staleflow profile`: measure the config's engine, fit the cost model, say how well it fits, save it.

Invariant: a third of the loads is held out from the fit, and the errors that are printed and saved are those
of every load that was measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from staleflow.config import Config
from staleflow.coordination.cost_model import (
    CostModel,
    FitError,
    StepPoint,
    errors_by_region,
    fit_cost_model,
    prefill_error,
    step_error,
)
from staleflow.errors import UserError
from staleflow.rollout.profiling import MeasuredLoad, Profile, plan_loads, profile
from staleflow.runtime.assembly import build_engine, build_tokenizer, initial_weights, max_model_len
from staleflow.storage.cost_file import check_target, save_cost_model
from staleflow.storage.provenance import provenance


def run_profile(config: Config, target: Path, *, repeats: int, force: bool, cpu_time: bool) -> int:
    """Measure, fit, print, save. Returns the exit code. Raises UserError."""
    check_target(target, force=force)
    if cpu_time and (config.rollout.engine != "torch" or config.rollout.threads > 1):
        raise UserError(
            "--cpu-time measures the torch engine with one thread, and this config has "
            f"{config.rollout.engine} with {config.rollout.threads}: leave it out"
        )
    measured = _measured(config, repeats, time.process_time if cpu_time else time.perf_counter)
    model = fit_cost_model(measured.steps(held_out=False), measured.prefills(held_out=False), measured.pull_s)
    errors = _errors(model, measured)
    Console().print(_table(errors, f"error of the cost model: {_engine(config)}"))
    print(_constants(model))
    print(
        f"The fastest step of each load counts; the median one was {measured.disturbance:.0%} slower in the "
        "mean, because of what else ran on the machine."
    )
    save_cost_model(target, model, _about(config, measured, errors, repeats, cpu_time), force=force)
    print(f"saved: {target} (name it as coordination.cost_model={target})")
    return 0


def _measured(config: Config, repeats: int, clock: Callable[[], float]) -> Profile:
    rollout = config.rollout
    loads = plan_loads(
        max_running=rollout.max_running,
        kv_capacity=rollout.kv_capacity_tokens,
        max_model_len=max_model_len(config),
    )
    tokenizer = build_tokenizer(config)
    engine = build_engine(config, tokenizer, spend=time.sleep, endless=True)
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=not console.is_terminal) as progress:
            task = progress.add_task("measuring", total=repeats * len(loads))
            return profile(
                engine,
                loads,
                weights=initial_weights(config),
                clock=clock,
                vocab_size=tokenizer.vocab_size,
                repeats=repeats,
                progress=lambda: progress.advance(task),
            )
    finally:
        engine.close()


# ---------------------------------------------------------------------- what is printed

Errors = Mapping[str, tuple[FitError, FitError]]
"""What was predicted -> (error on the loads fitted, error on those held out)."""


def _errors(model: CostModel, measured: Profile) -> Errors:
    fitted, held_out = measured.steps(held_out=False), measured.steps(held_out=True)
    every = [*fitted, *held_out]
    many = _middle([point.running for point in every])
    long = _middle([point.kv_tokens / point.running for point in every])
    regions = [errors_by_region(model, points, many=many, long=long) for points in (fitted, held_out)]
    errors = {f"{name}": (regions[0][name], regions[1][name]) for name in regions[0]}
    errors["decode steps, all"] = (step_error(model, fitted), step_error(model, held_out))
    for name, spread in (("lengths all the same", False), ("lengths spread", True)):
        errors[name] = (
            step_error(model, _of(measured.loads, spread, held_out=False)),
            step_error(model, _of(measured.loads, spread, held_out=True)),
        )
    errors["prefills"] = (
        prefill_error(model, measured.prefills(held_out=False)),
        prefill_error(model, measured.prefills(held_out=True)),
    )
    return errors


def _of(loads: Sequence[MeasuredLoad], spread: bool, *, held_out: bool) -> list[StepPoint]:
    return [load.step for load in loads if load.spread is spread and load.held_out is held_out]


def _middle(values: list[float]) -> float:
    """The boundary of small and large: the middle of their logarithms."""
    return math.exp(median([math.log(min(values)), math.log(max(values))]))


def _table(errors: Errors, title: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for part in ("fitted", "held out"):
        for column in (f"{part}", "mean", "p90", "max"):
            table.add_column(column, justify="right", no_wrap=True)
    for name, parts in errors.items():
        cells = [name]
        for error in parts:
            figures = (error.mean, error.p90, error.max)
            cells += [str(error.points), *(f"{f:.1%}" if error.points else "-" for f in figures)]
        table.add_row(*cells)
    return table


def _constants(model: CostModel) -> str:
    return (
        f"k1 {model.k1:.3g} s per cached token, k2 {model.k2:.3g} s per step at least, "
        f"k3 {model.k3:.3g} s per trajectory, k4 {model.k4:.3g} s per step, "
        f"prefill {model.prefill:.3g} s per token, pull {model.pull:.3g} s"
    )


def _engine(config: Config) -> str:
    if config.rollout.engine == "fake":
        return "fake"
    return f"{config.rollout.engine}, {config.model.source}, {config.rollout.threads} thread(s)"


# ---------------------------------------------------------------------- what is saved


def _about(config: Config, measured: Profile, errors: Errors, repeats: int, cpu_time: bool) -> dict[str, Any]:
    """Where the constants come from: JSON values."""
    rollout = config.rollout
    return {
        "engine": rollout.engine,
        "model_source": config.model.source,
        "threads": rollout.threads,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": provenance(),
        "clock": "cpu" if cpu_time else "wall",
        "repeats": repeats,
        "disturbance": measured.disturbance,
        "errors": {
            name: {"fitted": _error_json(fitted), "held_out": _error_json(held_out)}
            for name, (fitted, held_out) in errors.items()
        },
        "loads": [_load_json(load) for load in measured.loads],
    }


def _error_json(error: FitError) -> dict[str, float] | None:
    return asdict(error) if error.points else None


def _load_json(load: MeasuredLoad) -> dict[str, Any]:
    return {
        "running": load.step.running,
        "kv_tokens": load.step.kv_tokens,
        "step_s": load.step.seconds,
        "usual_step_s": load.usual_s,
        "prefilled_tokens": load.prefill.tokens if load.prefill else None,
        "prefill_s": load.prefill.seconds if load.prefill else None,
        "lengths": "spread" if load.spread else "same",
        "held_out": load.held_out,
    }
