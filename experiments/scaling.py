"""How throughput grows with response length, batch and GPUs, in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.experiments.cell_tables import Panel
from staleflow.experiments.cells import QUICK_CAPS, Effort
from staleflow.experiments.grid import GridStudy, Measurements, Page, Part, Row, Setting
from staleflow.experiments.points import middle
from staleflow.experiments.study import Finding, Table
from staleflow.experiments.workload import QUEUE, STALEFLOW, STRICT, SYNC, SYSTEM_NOTE, machine, workload

MODEL, BOUND = "qwen2.5-14b", 2
MOST, BATCH, GPUS = 20_480, 128, 64
"""What does not grow stays so: tokens of the longest response, prompts a batch, GPUs."""
SYSTEMS = (SYNC, STRICT, QUEUE, STALEFLOW)


def size(*, most: int = MOST, batch: int = BATCH, gpus: int = GPUS) -> Setting:
    """One setting; the median response is a quarter of the longest."""
    return Setting(
        name=f"{most}, {batch}, {gpus}",
        values=(most, batch, gpus),
        overrides=(*workload(batch=batch, most=most), *machine(MODEL)),
        gpus=gpus,
        bound=BOUND,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What grows while the rest stays."""

    name: str
    sizes: tuple[Setting, ...]
    marks: tuple[str, ...]

    def ends(self) -> Axis:
        """Its first and its third size."""
        return Axis(name=self.name, sizes=self.sizes[:3:2], marks=self.marks[:3:2])


AXES = (
    Axis(
        name="longest response",
        sizes=tuple(size(most=most) for most in (5_120, 10_240, 20_480, 40_960)),
        marks=("5K", "10K", "20K", "40K"),
    ),
    Axis(
        name="prompts a batch",
        sizes=tuple(size(batch=batch) for batch in (32, 64, 128, 256)),
        marks=("32", "64", "128", "256"),
    ),
    Axis(
        name="GPUs",
        sizes=tuple(size(gpus=gpus) for gpus in (32, 64, 128, 256)),
        marks=("32", "64", "128", "256"),
    ),
)
QUICK_AXES = tuple(axis.ends() for axis in AXES)


def _part(axes: Sequence[Axis], effort: Effort) -> Part:
    settings = dict.fromkeys(setting for axis in axes for setting in axis.sizes)
    return Part(settings=tuple(settings), systems=SYSTEMS, effort=effort)


FULL = _part(AXES, Effort(seeds=3, measured=4, layouts=2, rounds=1))
QUICK = _part(QUICK_AXES, Effort(seeds=2, measured=3, layouts=1, rounds=0, caps=QUICK_CAPS[1:]))


def _axes(parts: Sequence[Part]) -> tuple[Axis, ...]:
    return AXES if parts[0] == FULL else QUICK_AXES


def _findings(parts: Sequence[Part], at: Measurements) -> list[Finding]:
    return [
        Finding(
            name=f"{axis.name}: staleflow over {over.name} at {axis.marks[-1]}",
            value=at.gain(axis.sizes[-1], over).median,
            unit="x",
            note=f"{at.gain(axis.sizes[0], over).median:.2f}x at {axis.marks[0]}",
        )
        for axis in _axes(parts)
        for over in SYSTEMS[:-1]
    ]


def _tables(parts: Sequence[Part], at: Measurements) -> list[Table]:
    return [
        Table(
            title=f"By {axis.name}: trained tokens/s",
            columns=(
                *(axis.name, *(s.name for s in SYSTEMS)),
                *(f"staleflow over {s.name}" for s in SYSTEMS[:-1]),
                *("no layout exceeds", "staleflow of its bound", "side"),
            ),
            rows=tuple(_row(mark, s, at) for mark, s in zip(axis.marks, axis.sizes, strict=True)),
        )
        for axis in _axes(parts)
    ]


def _row(mark: str, setting: Setting, at: Measurements) -> Row:
    ours = at.outcome(setting, STALEFLOW)
    mid = middle(ours.runs)
    return (
        mark,
        *(at.rate(setting, system).median for system in SYSTEMS),
        *(at.gain_text(setting, system) for system in SYSTEMS[:-1]),
        ours.choice.most,
        f"{mid.tokens_per_s / mid.least:.0%}",
        mid.binding,
    )


def _panels(parts: Sequence[Part], at: Measurements) -> list[Panel]:
    return [at.panel(axis.name, axis.marks, axis.sizes, parts[0]) for axis in _axes(parts)]


def _notes(parts: Sequence[Part], at: Measurements) -> list[str]:
    return [
        f"{MODEL} on H20, η = {BOUND}; what does not grow stays at {MOST:,} tokens, {BATCH} prompts x 16 and "
        f"{GPUS} GPUs. The median response is a quarter of the longest. Every system is tuned anew at each "
        "size.",
        SYSTEM_NOTE,
    ]


GRID = GridStudy(
    name="scaling",
    question="How do throughput and speed-ups change with response length, batch and GPUs?",
    full=(FULL,),
    quick=(QUICK,),
    page=Page(
        along=("longest", "batch", "GPUs in all"),
        findings=_findings,
        tables=_tables,
        panels=_panels,
        panel_columns=lambda parts: len(AXES),
        panels_along="",
        notes=_notes,
        quick_note="Quick: the ends of each axis only, and little tuning.",
    ),
)
SCALING = GRID.study()
