"""What each strategy of staleflow is worth, in simulation: each one naive, and all of them.

Invariant: all variants run on the layout that was tuned for the whole of staleflow, so that strategies are
compared, not layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from staleflow.experiments.cell_tables import Panel
from staleflow.experiments.cells import Effort, System
from staleflow.experiments.grid import GridStudy, Measurements, Page, Part, Row, Setting
from staleflow.experiments.points import middle, rate_text
from staleflow.experiments.study import Finding, Table
from staleflow.experiments.workload import STALEFLOW, machine, workload

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


def setting(gpus: int, bound: int) -> Setting:
    """A size of cluster under η."""
    return Setting(
        name=f"{MODEL} on {gpus}",
        values=(gpus, bound),
        overrides=(*workload(), *machine(MODEL)),
        gpus=gpus,
        bound=bound,
    )


def part(gpus: Sequence[int], bounds: Sequence[int], effort: Effort) -> Part:
    """All variants on so many GPUs under each η."""
    settings = tuple(setting(g, b) for g in gpus for b in bounds)
    return Part(settings=settings, systems=VARIANTS, effort=effort, tuned_as=STALEFLOW)


FULL = part((64, 128), (1, 3), Effort(seeds=3, measured=5, layouts=2, rounds=1))
QUICK = part((128,), (1, 3), Effort(seeds=3, measured=4, layouts=2, rounds=0))


def _findings(parts: Sequence[Part], at: Measurements) -> list[Finding]:
    settings = parts[0].settings
    return [
        Finding(
            name=f"staleflow over {variant.name}, mean of {len(settings)} settings",
            value=fmean(at.gain(s, variant).median for s in settings),
            unit="x",
            note="; ".join(f"{s.gpus} GPUs, η = {s.bound}: {at.gain_text(s, variant)}" for s in settings),
        )
        for variant in VARIANTS[1:]
    ]


def _tables(parts: Sequence[Part], at: Measurements) -> list[Table]:
    return [
        Table(
            title="Each strategy naive",
            columns=(
                *("GPUs", "η", "variant", "tokens/s", "staleflow is so much faster", "the strategy"),
                *("trainer idle", "pulling", "interrupts", "preemptions"),
            ),
            rows=tuple(_row(s, variant, at) for s in parts[0].settings for variant in VARIANTS),
            note="Medians over seeds, least and most in brackets. No difference: less than 1 %. Within the "
            "spread: the seeds' ratios lie on both sides of 1. Where the trainer is hardly ever idle, "
            "training binds, and no strategy can show.",
        )
    ]


def _row(where: Setting, variant: System, at: Measurements) -> Row:
    mid, gain = middle(at.outcome(where, variant).runs), at.gain(where, variant)
    within = gain.least <= 1.0 <= gain.most
    is_whole = variant == STALEFLOW
    return (
        *where.values,
        variant.name,
        rate_text(at.rate(where, variant)),
        "" if is_whole else at.gain_text(where, variant),
        "" if is_whole else _verdict(gain.median, within),
        f"{mid.trainer_idle:.0%}",
        f"{mid.pulling:.1%}",
        int(mid.interrupts),
        int(mid.preemptions),
    )


def _verdict(gain: float, within: bool) -> str:
    if abs(gain - 1) < NEGLIGIBLE:
        return "no difference"
    if within:
        return "within the spread"
    return "pays" if gain > 1 else "costs"


def _by_gpus(parts: Sequence[Part]) -> dict[int, list[Setting]]:
    found: dict[int, list[Setting]] = {}
    for s in parts[0].settings:
        found.setdefault(s.gpus, []).append(s)
    return found


def _panels(parts: Sequence[Part], at: Measurements) -> list[Panel]:
    return [
        at.panel(f"{MODEL} on {gpus} H20", [str(s.bound) for s in there], there, parts[0], bounds=False)
        for gpus, there in _by_gpus(parts).items()
    ]


def _notes(parts: Sequence[Part], at: Measurements) -> list[str]:
    return [
        f"{MODEL} on H20, the workload of the study `throughput`. Layouts are those tuned for the whole of "
        "staleflow. Naive routing sends a trajectory to the instance with fewest, naive synchronization lets "
        "every instance pull as soon as there is something newer, naive migration never moves anything.",
        "Where a variant is as fast as the whole, within the spread of its seeds, it buys nothing.",
    ]


GRID = GridStudy(
    name="ablation",
    question="What is each of routing, synchronization and migration worth?",
    full=(FULL,),
    quick=(QUICK,),
    page=Page(
        along=("GPUs in all", "η"),
        findings=_findings,
        tables=_tables,
        panels=_panels,
        panel_columns=lambda parts: len(_by_gpus(parts)),
        panels_along="η",
        notes=_notes,
        quick_note="Quick: one size of cluster, fewer seeds and steps.",
    ),
)
ABLATION = GRID.study()
