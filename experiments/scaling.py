"""How throughput grows with response length, batch and GPUs, in simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from staleflow.experiments.cell_tables import Panel, cell_table, panels_figure
from staleflow.experiments.cells import QUICK_CAPS, Cell, Effort, Outcome, System, cell, measure_cells
from staleflow.experiments.points import PointFile, middle, speedup, spread
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.experiments.workload import (
    HARDWARE_NOTE,
    LENGTH_NOTE,
    QUEUE,
    STALEFLOW,
    STRICT,
    SYNC,
    SYSTEM_NOTE,
    machine,
    workload,
)
from staleflow.storage.provenance import provenance

MODEL, BOUND = "qwen2.5-14b", 2
SYSTEMS = (SYNC, STRICT, QUEUE, STALEFLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One setting."""

    most: int = 20_480
    """Tokens of the longest response; the median is a quarter."""
    batch: int = 128
    gpus: int = 64

    def cell(self, system: System) -> Cell:
        """A system in it."""
        overrides = (*workload(batch=self.batch, most=self.most), *machine(MODEL))
        name = f"{self.most}, {self.batch}, {self.gpus}"
        return cell(name, overrides, self.gpus, BOUND, system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What grows while the rest stays."""

    name: str
    sizes: tuple[Size, ...]
    marks: tuple[str, ...]


AXES = (
    Axis(
        name="longest response",
        sizes=tuple(Size(most=most) for most in (5_120, 10_240, 20_480, 40_960)),
        marks=("5K", "10K", "20K", "40K"),
    ),
    Axis(
        name="prompts a batch",
        sizes=tuple(Size(batch=batch) for batch in (32, 64, 128, 256)),
        marks=("32", "64", "128", "256"),
    ),
    Axis(
        name="GPUs",
        sizes=tuple(Size(gpus=gpus) for gpus in (32, 64, 128, 256)),
        marks=("32", "64", "128", "256"),
    ),
)
QUICK_AXES = tuple(
    Axis(name=axis.name, sizes=axis.sizes[first : first + 3 : 2], marks=axis.marks[first : first + 3 : 2])
    for axis, first in zip(AXES, (0, 0, 0), strict=True)
)
FULL_EFFORT = Effort(seeds=3, measured=4, layouts=2, rounds=1)
QUICK_EFFORT = Effort(seeds=2, measured=3, layouts=1, rounds=0, caps=QUICK_CAPS[1:])


def measure_scaling(options: Options) -> Result:
    """All axes."""
    axes, effort = (QUICK_AXES, QUICK_EFFORT) if options.quick else (AXES, FULL_EFFORT)
    file = PointFile((options.folder or Path("runs/experiment-scaling")) / "scaling.points.jsonl")
    sizes = list(dict.fromkeys(size for axis in axes for size in axis.sizes))
    options.say(f"{len(sizes)} sizes, {len(SYSTEMS)} systems, {effort.seeds} seeds")
    found = measure_cells([size.cell(system) for size in sizes for system in SYSTEMS], effort, file)
    return summarise(axes, found, effort, quick=options.quick)


def summarise(axes: Sequence[Axis], found: Mapping[Cell, Outcome], effort: Effort, *, quick: bool) -> Result:
    """Findings, tables, figure and notes of measured cells."""
    sizes = list(dict.fromkeys(size for axis in axes for size in axis.sizes))
    return Result(
        findings=tuple(finding for axis in axes for finding in _findings(axis, found)),
        tables=(
            *(_axis_table(axis, found) for axis in axes),
            cell_table(
                "All cells",
                ("longest", "batch", "GPUs in all"),
                [
                    ((size.most, size.batch, size.gpus), system.name, found[size.cell(system)])
                    for size in sizes
                    for system in SYSTEMS
                ],
            ),
        ),
        figures={"scaling.svg": _figure(axes, found)},
        notes=(
            f"Made by `staleflow experiment scaling{' --quick' if quick else ''}` at commit "
            f"{provenance()['git']}.",
            f"{MODEL} on H20, η = {BOUND}; what does not grow stays at {Size().most:,} tokens, "
            f"{Size().batch} prompts x 16 and {Size().gpus} GPUs. The median response is a quarter of the "
            f"longest. Every system is tuned anew "
            "at each size.",
            SYSTEM_NOTE,
            LENGTH_NOTE,
            HARDWARE_NOTE,
            f"{effort.seeds} seeds; {effort.measured} steps or more count after the first η + 2, in whole "
            f"rounds of η + 1: from empty buffers batches come in bursts of so many.",
            *(("Quick: the ends of each axis only, and little tuning.",) if quick else ()),
        ),
    )


def _findings(axis: Axis, found: Mapping[Cell, Outcome]) -> list[Finding]:
    least, most = axis.sizes[0], axis.sizes[-1]
    findings = []
    for over in SYSTEMS[:-1]:
        few, many = (
            speedup(found[size.cell(STALEFLOW)].runs, found[size.cell(over)].runs) for size in (least, most)
        )
        findings.append(
            Finding(
                name=f"{axis.name}: staleflow over {over.name} at {axis.marks[-1]}",
                value=many.median,
                unit="x",
                note=f"{few.median:.2f}x at {axis.marks[0]}",
            )
        )
    return findings


def _axis_table(axis: Axis, found: Mapping[Cell, Outcome]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for mark, size in zip(axis.marks, axis.sizes, strict=True):
        outcomes = {system: found[size.cell(system)] for system in SYSTEMS}
        ours = outcomes[STALEFLOW]
        mid = middle(ours.runs)
        rows.append(
            (
                mark,
                *(spread([run.tokens_per_s for run in outcomes[s].runs]).median for s in SYSTEMS),
                *(speedup(ours.runs, outcomes[s].runs).ratio_text for s in SYSTEMS[:-1]),
                ours.choice.most,
                f"{mid.tokens_per_s / mid.least:.0%}",
                mid.binding,
            )
        )
    return Table(
        title=f"By {axis.name}: trained tokens/s",
        columns=(
            *(axis.name, *(s.name for s in SYSTEMS)),
            *(f"staleflow over {s.name}" for s in SYSTEMS[:-1]),
            *("no layout exceeds", "staleflow of its bound", "side"),
        ),
        rows=tuple(rows),
    )


def _figure(axes: Sequence[Axis], found: Mapping[Cell, Outcome]) -> str:
    return panels_figure(
        "scaling",
        [
            Panel(
                title=axis.name,
                marks=axis.marks,
                lines={
                    system.name: [
                        spread([run.tokens_per_s / 1000 for run in found[size.cell(system)].runs])
                        for size in axis.sizes
                    ]
                    for system in SYSTEMS
                },
                bound=[found[size.cell(STALEFLOW)].choice.most / 1000 for size in axis.sizes],
            )
            for axis in axes
        ],
        columns=len(axes),
        along="",
        label="1,000 trained tokens/s",
    )


SCALING = Study(
    name="scaling",
    question="How do throughput and speed-ups change with response length, batch and GPUs?",
    script=measure_scaling,
)
