"""What each strategy of staleflow is worth, in simulation: each one naive, and all of them.

Invariant: all variants run on the layout that was tuned for the whole of staleflow, so that strategies are
compared, not layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from staleflow.experiments.cell_tables import Panel, cell_table, panels_figure
from staleflow.experiments.cells import Cell, Effort, Outcome, System, cell, measure_chosen, tune
from staleflow.experiments.points import PointFile, Spread, middle, speedup, spread
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.experiments.workload import HARDWARE_NOTE, LENGTH_NOTE, STALEFLOW, machine, workload
from staleflow.storage.provenance import provenance

MODEL = "qwen2.5-14b"
STRATEGIES = ("routing", "synchronization", "migration")
NAIVE = {s: f"coordination.{s}.strategy=naive" for s in STRATEGIES}
VARIANTS = (
    STALEFLOW,
    *(System(name=f"naive {s}", policy="staleflow", overrides=(NAIVE[s],)) for s in STRATEGIES),
    System(name="all naive", policy="staleflow", overrides=tuple(NAIVE.values())),
)
NEGLIGIBLE = 0.01
"""Of the throughput: less than what another seed changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is simulated."""

    gpus: tuple[int, ...]
    bounds: tuple[int, ...]
    effort: Effort


FULL = Grid(gpus=(64, 128), bounds=(1, 3), effort=Effort(seeds=3, measured=5, layouts=2, rounds=1))
QUICK = Grid(gpus=(128,), bounds=(1, 3), effort=Effort(seeds=3, measured=4, layouts=2, rounds=0))


def measure_ablation(options: Options) -> Result:
    """Tune staleflow, then measure it and its variants on the same layouts."""
    grid = QUICK if options.quick else FULL
    file = PointFile((options.folder or Path("runs/experiment-ablation")) / "ablation.points.jsonl")
    options.say(f"{len(grid.gpus) * len(grid.bounds)} settings, {len(VARIANTS)} variants")
    whole = [grid_cell(g, b, STALEFLOW) for g in grid.gpus for b in grid.bounds]
    tuned = tune(whole, grid.effort, file)
    choices = {
        grid_cell(g, b, variant): tuned[grid_cell(g, b, STALEFLOW)]
        for g in grid.gpus
        for b in grid.bounds
        for variant in VARIANTS
    }
    return summarise(grid, measure_chosen(choices, grid.effort, file), quick=options.quick)


def grid_cell(gpus: int, bound: int, variant: System) -> Cell:
    """A variant in a setting."""
    return cell(f"{MODEL} on {gpus}", (*workload(), *machine(MODEL)), gpus, bound, variant)


def summarise(grid: Grid, found: Mapping[Cell, Outcome], *, quick: bool) -> Result:
    """Findings, table, figure and notes of measured cells."""
    settings = [(g, b) for g in grid.gpus for b in grid.bounds]
    return Result(
        findings=tuple(
            Finding(
                name=f"staleflow over {variant.name}, mean of {len(settings)} settings",
                value=fmean(_gain(found, g, b, variant).median for g, b in settings),
                unit="x",
                note="; ".join(
                    f"{g} GPUs, η = {b}: {_gain(found, g, b, variant).ratio_text}" for g, b in settings
                ),
            )
            for variant in VARIANTS[1:]
        ),
        tables=(
            _loss_table(grid, found),
            cell_table(
                "All cells",
                ("GPUs in all", "η"),
                [((g, b), v.name, found[grid_cell(g, b, v)]) for g, b in settings for v in VARIANTS],
            ),
        ),
        figures={"ablation.svg": _figure(grid, found)},
        notes=(
            f"Made by `staleflow experiment ablation{' --quick' if quick else ''}` at commit "
            f"{provenance()['git']}.",
            f"{MODEL} on H20, the workload of the study `throughput`. Layouts are those tuned for the whole "
            f"of "
            "staleflow. Naive routing sends a trajectory to the instance with fewest, naive synchronization "
            "lets every instance pull as soon as there is something newer, naive migration never moves "
            "anything.",
            "Where a variant is as fast as the whole, within the spread of its seeds, it buys nothing.",
            LENGTH_NOTE,
            HARDWARE_NOTE,
            f"{grid.effort.seeds} seeds; {grid.effort.measured} steps or more count after the first η + 2, "
            f"in whole rounds of η + 1: from empty buffers batches come in bursts of so many.",
            *(("Quick: one size of cluster, fewer seeds and steps.",) if quick else ()),
        ),
    )


def _gain(found: Mapping[Cell, Outcome], gpus: int, bound: int, over: System) -> Spread:
    return speedup(found[grid_cell(gpus, bound, STALEFLOW)].runs, found[grid_cell(gpus, bound, over)].runs)


def _loss_table(grid: Grid, found: Mapping[Cell, Outcome]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for gpus in grid.gpus:
        for bound in grid.bounds:
            for variant in VARIANTS:
                outcome = found[grid_cell(gpus, bound, variant)]
                mid = middle(outcome.runs)
                gain = _gain(found, gpus, bound, variant)
                within = gain.least <= 1.0 <= gain.most
                rows.append(
                    (
                        gpus,
                        bound,
                        variant.name,
                        str(spread([run.tokens_per_s for run in outcome.runs])),
                        "" if variant == STALEFLOW else gain.ratio_text,
                        "" if variant == STALEFLOW else _verdict(gain.median, within),
                        f"{mid.trainer_idle:.0%}",
                        f"{mid.pulling:.1%}",
                        int(mid.interrupts),
                        int(mid.preemptions),
                    )
                )
    return Table(
        title="Each strategy naive",
        columns=(
            *("GPUs", "η", "variant", "tokens/s", "staleflow is so much faster", "the strategy"),
            *("trainer idle", "pulling", "interrupts", "preemptions"),
        ),
        rows=tuple(rows),
        note="Medians over seeds, least and most in brackets. No difference: less than 1 %. Within the "
        "spread: the "
        "seeds' ratios lie on both sides of 1. Where the trainer is hardly ever idle training binds, and no "
        "strategy can show.",
    )


def _verdict(gain: float, within: bool) -> str:
    if abs(gain - 1) < NEGLIGIBLE:
        return "no difference"
    if within:
        return "within the spread"
    return "pays" if gain > 1 else "costs"


def _figure(grid: Grid, found: Mapping[Cell, Outcome]) -> str:
    return panels_figure(
        "ablation",
        [
            Panel(
                title=f"{MODEL} on {gpus} H20",
                marks=tuple(str(b) for b in grid.bounds),
                lines={
                    v.name: [
                        spread([run.tokens_per_s / 1000 for run in found[grid_cell(gpus, b, v)].runs])
                        for b in grid.bounds
                    ]
                    for v in VARIANTS
                },
            )
            for gpus in grid.gpus
        ],
        columns=len(grid.gpus),
        along="η",
        label="1,000 trained tokens/s",
    )


ABLATION = Study(
    name="ablation",
    question="What is each of routing, synchronization and migration worth?",
    script=measure_ablation,
)
