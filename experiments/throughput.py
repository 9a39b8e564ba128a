"""The paper's main comparison, in simulation: trained tokens a second of five policies on 64 and 128 H20.

Invariant: every figure comes from measured cells; what the paper says stands beside it and is marked as the
paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from staleflow.experiments.cell_tables import Panel, cell_table, panels_figure
from staleflow.experiments.cells import QUICK_CAPS, Cell, Effort, Outcome, System, cell, measure_cells
from staleflow.experiments.points import PointFile, Spread, middle, speedup, spread
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.experiments.workload import (
    DIVIDED,
    HARDWARE_NOTE,
    LENGTH_NOTE,
    ONE_STEP,
    QUEUE,
    STALEFLOW,
    STRICT,
    SYNC,
    SYSTEM_NOTE,
    SYSTEMS,
    machine,
    workload,
)
from staleflow.storage.provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One thing about the cluster or the workload that is otherwise."""

    name: str
    overrides: tuple[str, ...]


VARIED_MODEL, VARIED_GPUS, VARIED_BOUND = "qwen2.5-14b", 128, 3
FASTER_TRAINER = ("simulation.efficiency.training_compute=0.6", "simulation.training.logprob_passes=0")
SLOWER_ENGINE = (
    "simulation.efficiency.memory_bandwidth=0.4",
    "simulation.efficiency.step_overhead_s=0.01",
)
SHORT_PROMPTS = "simulation.prompt_tokens=256"
VARIATIONS = (
    Variation(name="as in the grid", overrides=()),
    Variation(name="a change of phase takes 60 s", overrides=("simulation.latencies.switch_s=60",)),
    Variation(name="prompts of 256 tokens", overrides=(SHORT_PROMPTS,)),
    Variation(
        name="shorter responses, heavier tail: median 2,048, sigma 1.2",
        overrides=("simulation.lengths.median=2048", "simulation.lengths.sigma=1.2"),
    ),
    Variation(name="a faster trainer: 60 % of the FLOPs, no log-prob pass", overrides=FASTER_TRAINER),
    Variation(
        name="a slower engine: 40 % of the memory bandwidth, 10 ms a decode step", overrides=SLOWER_ENGINE
    ),
    Variation(
        name="faster trainer, slower engine, prompts of 256",
        overrides=(*FASTER_TRAINER, *SLOWER_ENGINE, SHORT_PROMPTS),
    ),
    Variation(name="H100 GPUs", overrides=("simulation.gpu=H100",)),
)
VARIED_SYSTEMS = (SYNC, DIVIDED, STRICT, QUEUE, STALEFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is simulated."""

    models: tuple[str, ...]
    gpus: tuple[int, ...]
    bounds: tuple[int, ...]
    effort: Effort
    variations: tuple[Variation, ...]
    varied_effort: Effort


FULL = Grid(
    models=("qwen2.5-14b", "qwen2.5-32b", "qwen3-30b-a3b"),
    gpus=(64, 128),
    bounds=(1, 2, 3),
    effort=Effort(seeds=3, measured=5, layouts=2, rounds=1),
    variations=VARIATIONS,
    varied_effort=Effort(seeds=3, measured=4, layouts=2, rounds=1),
)
QUICK = Grid(
    models=("qwen2.5-14b", "qwen3-30b-a3b"),
    gpus=(128,),
    bounds=(1, 3),
    effort=Effort(seeds=3, measured=4, layouts=2, rounds=0, caps=QUICK_CAPS),
    variations=(VARIATIONS[0], VARIATIONS[6]),
    varied_effort=Effort(seeds=3, measured=4, layouts=2, rounds=0, caps=QUICK_CAPS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What staleflow is compared with, what the paper says of that, and what is aimed at here."""

    system: System
    paper: tuple[float, float] | None
    """Speed-up of the paper's system: mean and best."""
    goal: tuple[float, float] | None


BASELINES = (
    Baseline(system=SYNC, paper=(1.91, 2.68), goal=(1.9, 2.6)),
    Baseline(system=DIVIDED, paper=(1.91, 2.68), goal=None),
    Baseline(system=ONE_STEP, paper=None, goal=None),
    Baseline(system=STRICT, paper=(1.18, 1.42), goal=(1.18, 1.42)),
    Baseline(system=QUEUE, paper=(1.18, 1.42), goal=None),
)
"""The paper compares with a synchronous system and with the best of those that keep a bound strictly."""

Place = tuple[str, int, int]
"""Model, GPUs, η."""


def measure_throughput(options: Options) -> Result:
    """The grid, then what its ratios hang on."""
    grid = QUICK if options.quick else FULL
    file = PointFile((options.folder or Path("runs/experiment-throughput")) / "throughput.points.jsonl")
    options.say(f"{len(places(grid))} settings, {len(SYSTEMS)} systems, {grid.effort.seeds} seeds")
    found = measure_cells(
        [grid_cell(place, system) for place in places(grid) for system in SYSTEMS], grid.effort, file
    )
    options.say(f"{len(grid.variations)} variations of one setting")
    varied = measure_cells(
        [varied_cell(v, system) for v in grid.variations for system in VARIED_SYSTEMS],
        grid.varied_effort,
        file,
    )
    return summarise(grid, found, varied, quick=options.quick)


def places(grid: Grid) -> list[Place]:
    """All settings."""
    return [(m, g, b) for m in grid.models for g in grid.gpus for b in grid.bounds]


def grid_cell(place: Place, system: System) -> Cell:
    """A system in a setting."""
    model, gpus, bound = place
    return cell(f"{model} on {gpus}", (*workload(), *machine(model)), gpus, bound, system)


def varied_cell(variation: Variation, system: System) -> Cell:
    """A system in a variation of the one setting."""
    overrides = (*workload(), *machine(VARIED_MODEL), *variation.overrides)
    return cell(f"{VARIED_MODEL} on {VARIED_GPUS}", overrides, VARIED_GPUS, VARIED_BOUND, system)


# ---------------------------------------------------------------------- what they say


def summarise(
    grid: Grid, found: Mapping[Cell, Outcome], varied: Mapping[Cell, Outcome], *, quick: bool
) -> Result:
    """Findings, tables, figure and notes of measured cells."""

    def at(place: Place, system: System) -> Outcome:
        return found[grid_cell(place, system)]

    every = places(grid)
    return Result(
        findings=tuple(_findings(every, at, quick=quick)),
        tables=(
            _paper_table(every, at),
            _speedup_table(every, at),
            _variation_table(grid, varied),
            cell_table(
                "All cells",
                ("model", "GPUs", "η"),
                [((m, g, _eta(s, b)), s.name, at((m, g, b), s)) for m, g, b, s in _once(every)],
            ),
        ),
        figures={"throughput.svg": _figure(grid, at)},
        notes=_notes(grid, every, at, quick),
    )


At = Callable[[Place, System], Outcome]


def gain(at: At, place: Place, over: System) -> Spread:
    """Speed-up of staleflow in a setting, over the seeds."""
    return speedup(at(place, STALEFLOW).runs, at(place, over).runs)


def room(at: At, place: Place, over: System) -> float:
    """What no policy on divided GPUs exceeds, over a system: best bound of any layout / its throughput."""
    rate = spread([run.tokens_per_s for run in at(place, over).runs]).median
    return at(place, STALEFLOW).choice.most / rate


def _findings(every: Sequence[Place], at: At, *, quick: bool) -> list[Finding]:
    findings = []
    for baseline in BASELINES:
        gains = [gain(at, place, baseline.system).median for place in every]
        for name, value, index in (("mean", fmean(gains), 0), ("best", max(gains), 1)):
            where = [] if index == 0 else [_named(every[gains.index(value)])]
            paper = [] if baseline.paper is None else [f"the paper: {baseline.paper[index]}x"]
            findings.append(
                Finding(
                    name=f"staleflow over {baseline.system.name}, {name} of {len(every)} settings",
                    value=value,
                    unit="x",
                    goal=None if quick or baseline.goal is None else baseline.goal[index],
                    wanted="at least",
                    note="; ".join([*paper, *where]),
                )
            )
        findings.append(
            Finding(
                name=f"staleflow over {baseline.system.name}, least",
                value=min(gains),
                unit="x",
                note=_named(every[gains.index(min(gains))]),
            )
        )
    for name, values in (
        ("no policy exceeds, over sync", [room(at, place, SYNC) for place in every]),
        ("no policy exceeds, over strict", [room(at, place, STRICT) for place in every]),
    ):
        findings.append(
            Finding(
                name=f"{name}, mean and best",
                value=fmean(values),
                unit="x",
                note=f"at most {max(values):.2f}x: the best bound of any layout against the baseline",
            )
        )
    of_bound = [_of_bound(at(place, STALEFLOW)) for place in every]
    findings.append(
        Finding(
            name="staleflow, share of the least bound of its layout, mean",
            value=100 * fmean(of_bound),
            unit="%",
            note=f"{min(of_bound):.0%} to {max(of_bound):.0%}",
        )
    )
    return findings


def _named(place: Place) -> str:
    return f"{place[0]} on {place[1]}, η = {place[2]}"


def _of_bound(outcome: Outcome) -> float:
    return spread([run.tokens_per_s / run.least for run in outcome.runs]).median


def _paper_table(every: Sequence[Place], at: At) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for baseline in BASELINES:
        gains = [gain(at, place, baseline.system).median for place in every]
        here = f"{fmean(gains):.2f}x mean, {max(gains):.2f}x best"
        paper = "not given separately"
        verdict = "cannot be said"
        if baseline.paper is not None:
            paper = f"{baseline.paper[0]}x mean, {baseline.paper[1]}x best"
            verdict = agreement(fmean(gains), max(gains), baseline.paper)
        rows.append((baseline.system.name, paper, here, f"{min(gains):.2f}x", verdict))
    return Table(
        title="Beside the paper: staleflow over each baseline",
        columns=("over", "the paper (arXiv 2601.12784)", "here", "least", "agreement"),
        rows=tuple(rows),
        note="The paper's 1.91x and 2.68x are over a synchronous system; whether that is colocated decides "
        "with which of our two it is to be compared. Its 1.18x and 1.42x are over the best baseline with a "
        "strict bound, whose routing may be that of `strict` or nearer to `strict_queue`. Agrees: mean and "
        "best are not more than 10 % below the paper's.",
    )


def agreement(mean: float, best: float, paper: tuple[float, float]) -> str:
    """In words; 10 % less than the paper still agrees."""
    reached = [value >= 0.9 * theirs for value, theirs in zip((mean, best), paper, strict=True)]
    if all(reached):
        return "agrees"
    return (
        "the mean does, the best does not"
        if reached[0]
        else ("the best does, the mean does not" if reached[1] else "less than the paper")
    )


def _speedup_table(every: Sequence[Place], at: At) -> Table:
    return Table(
        title="Speed-up of staleflow by setting",
        columns=(
            *("model", "GPUs", "η", *(f"over {b.system.name}" for b in BASELINES)),
            *("no policy exceeds, over sync", "over strict", "of its bound", "side"),
        ),
        rows=tuple(
            (
                *place,
                *(gain(at, place, b.system).ratio_text for b in BASELINES),
                f"{room(at, place, SYNC):.2f}",
                f"{room(at, place, STRICT):.2f}",
                f"{_of_bound(at(place, STALEFLOW)):.0%}",
                middle(at(place, STALEFLOW).runs).binding,
            )
            for place in every
        ),
        note="Medians of the seeds' ratios, and the least and the most. What no policy exceeds: the best "
        "bound of any layout of so many GPUs under this η, over what the baseline reached. Where that is "
        "below a goal, no coordination can reach it with these machines and lengths.",
    )


def _variation_table(grid: Grid, varied: Mapping[Cell, Outcome]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for variation in grid.variations:
        outcomes = {s: varied[varied_cell(variation, s)] for s in VARIED_SYSTEMS}
        ours, sync = outcomes[STALEFLOW], outcomes[SYNC]
        mid = middle(sync.runs)
        rate = spread([run.tokens_per_s for run in sync.runs]).median
        rows.append(
            (
                variation.name,
                mid.step_s,
                f"{mid.update_s / mid.step_s:.0%}",
                *(speedup(ours.runs, outcomes[s].runs).ratio_text for s in VARIED_SYSTEMS[:-1]),
                f"{ours.choice.most / rate:.2f}",
                middle(ours.runs).binding,
            )
        )
    return Table(
        title=f"What the ratios hang on: {VARIED_MODEL} on {VARIED_GPUS}, η = {VARIED_BOUND}",
        columns=(
            *("one thing otherwise", "sync: s a step", "of it training"),
            *(f"over {s.name}" for s in VARIED_SYSTEMS[:-1]),
            *("no policy exceeds, over sync", "side"),
        ),
        rows=tuple(rows),
        note="All systems tuned anew for each line.",
    )


def _once(every: Sequence[Place]) -> list[tuple[str, int, int, System]]:
    """Each cell once, at the first η that it stands for."""
    seen: dict[Cell, tuple[str, int, int, System]] = {}
    for m, g, b in every:
        for system in SYSTEMS:
            seen.setdefault(grid_cell((m, g, b), system), (m, g, b, system))
    return list(seen.values())


def _eta(system: System, bound: int) -> int:
    return system.kept(bound)


def _figure(grid: Grid, at: At) -> str:
    return panels_figure(
        "throughput",
        [
            Panel(
                title=f"{model} on {gpus} H20",
                marks=tuple(str(b) for b in grid.bounds),
                lines={
                    s.name: [
                        spread([run.tokens_per_s / 1000 for run in at((model, gpus, b), s).runs])
                        for b in grid.bounds
                    ]
                    for s in SYSTEMS
                },
                bound=[at((model, gpus, b), STALEFLOW).choice.most / 1000 for b in grid.bounds],
            )
            for model in grid.models
            for gpus in grid.gpus
        ],
        columns=len(grid.gpus),
        along="η",
        label="1,000 trained tokens/s",
    )


def _notes(grid: Grid, every: Sequence[Place], at: At, quick: bool) -> tuple[str, ...]:
    sync = [middle(at((m, g, grid.bounds[0]), SYNC).runs) for m in grid.models for g in grid.gpus]
    training = [run.update_s / run.step_s for run in sync]
    sides = [middle(at(place, STALEFLOW).runs).binding for place in every]
    counted = ", ".join(f"{side} in {sides.count(side)}" for side in sorted(set(sides)))
    return (
        f"Made by `staleflow experiment throughput{' --quick' if quick else ''}` at commit "
        f"{provenance()['git']}.",
        SYSTEM_NOTE,
        LENGTH_NOTE,
        HARDWARE_NOTE,
        f"Tuning, for every system the same: the {grid.effort.layouts} layouts that the bounds promise "
        f"most of, "
        "each with another number of GPUs an instance, are simulated shortly, with a seed that is not "
        "measured; "
        + (
            "then the neighbours of the best, a sixteenth of the GPUs more and fewer to generate with; "
            if grid.effort.rounds
            else "how the GPUs are divided is what the bounds say, which know nothing of the cost of pulls; "
        )
        + "then the cap of `strict_queue`. μ, φ and ψ of staleflow are the defaults.",
        f"Why the ratio to sync is what it is. An asynchronous system hides the shorter phase behind the "
        f"longer one and saves the wait for the longest responses; it does not make training cheaper. "
        f"Training takes {min(training):.0%} to {max(training):.0%} of a step of sync here, for an H20 has "
        "few FLOPs beside its bandwidth, and in either system training takes GPUs away from generation. "
        "Over synchronous training on divided GPUs the ratio is far larger, because there one side always "
        f"waits for the other. The least bound of staleflow's layouts: {counted} of {len(every)} settings.",
        f"{grid.effort.seeds} seeds; {grid.effort.measured} steps or more count after the first η + 2, in "
        f"whole rounds of η + 1: from empty buffers batches come in bursts of so many.",
        *(
            ("Quick: fewer models, sizes, seeds and steps, and little tuning; nothing is judged by it.",)
            if quick
            else ()
        ),
    )


THROUGHPUT = Study(
    name="throughput",
    question="How many tokens a second does each policy train on, on 64 and 128 GPUs, and how far is that "
    "from what is possible?",
    script=measure_throughput,
)
