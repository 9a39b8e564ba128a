"""Cells of a study's grid: a machine, a workload, a bound and a system; each tuned by itself, then measured.

Invariants: every system is tuned by the same search, with a seed that is not measured; the search sees no
system's name, but that `strict_queue` has one more value to tune, its cap; a policy that keeps a smaller
bound than η is one cell for all η.

The search: the layout that the bounds promise most of, for each number of GPUs that an instance may have, is
simulated shortly, the most promising first; then the neighbours of the best one, a sixteenth of the GPUs more
and fewer to generate with, in rounds; then, for `strict_queue`, caps around the load that just fits the KV
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from staleflow.config import load_config
from staleflow.coordination.policies import effective_bound
from staleflow.experiments.points import Point, PointFile, PointResult, measure
from staleflow.simulation.planning import Candidate, beginning, find_candidates, whole_rounds

TUNING_SEED = 1000
STRIDE = 16
FIRST_CAP = 0.85
"""Of the load that just fits an instance's KV cache on average: room for what varies."""
CAPS = (0.5, 0.7, 1.0, 1.25)
"""Further caps that are tried on the best layout."""
QUICK_CAPS = (0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy with its strategies."""

    name: str
    policy: str
    overrides: tuple[str, ...] = ()
    bound: int | None = None
    """Kept whatever η is; None: what the policy keeps under η."""

    def kept(self, bound: int) -> int:
        """The staleness bound that it keeps."""
        return effective_bound(self.policy, bound if self.bound is None else self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is tuned and measured over seeds."""

    name: str
    """Of machine and workload."""
    overrides: tuple[str, ...]
    """Machine and workload, but for the layout."""
    gpus: int
    bound: int
    """That the system keeps."""
    system: System


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated."""

    seeds: int
    measured: int
    """Steps of a run that count, at least: whole rounds of η + 1; η + 2 before them do not."""
    layouts: int
    """Tried first, each with another number of GPUs an instance."""
    rounds: int
    """Of neighbours of the best."""
    tuning_steps: int = 3
    caps: tuple[float, ...] = CAPS
    """Further caps of `strict_queue`, as shares of the load that just fits the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A tuned cell."""

    candidate: Candidate
    cap: int | None
    tried: int
    """Short simulations."""
    most: float
    """The largest of all layouts' least bounds: tokens per second that no layout exceeds."""

    @property
    def layout_text(self) -> str:
        """Instances x GPUs of each + GPUs for training."""
        layout = self.candidate.layout
        return f"{self.candidate.instances} x {layout.tensor_parallel} + {layout.training_gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """A measured cell."""

    choice: Choice
    runs: tuple[PointResult, ...]
    """One for each seed."""


def cell(name: str, overrides: Sequence[str], gpus: int, bound: int, system: System) -> Cell:
    """The cell of a system under η = `bound`."""
    return Cell(name=name, overrides=tuple(overrides), gpus=gpus, bound=system.kept(bound), system=system)


def measure_cells(cells: Sequence[Cell], effort: Effort, file: PointFile) -> dict[Cell, CellOutcome]:
    """Tune every cell, and measure it over all seeds."""
    wanted = list(dict.fromkeys(cells))
    choices = tune(wanted, effort, file)
    return measure_chosen({c: choices[c] for c in wanted}, effort, file)


def measure_chosen(choices: dict[Cell, Choice], effort: Effort, file: PointFile) -> dict[Cell, CellOutcome]:
    """Measure cells as they were tuned."""
    points = {
        c: [_point(c, choice.candidate, choice.cap, seed, effort.measured) for seed in range(effort.seeds)]
        for c, choice in choices.items()
    }
    found = measure((p for each in points.values() for p in each), file, title="measuring")
    return {
        c: CellOutcome(choice=choices[c], runs=tuple(found[p] for p in each)) for c, each in points.items()
    }


# ---------------------------------------------------------------------- the search


def tune(cells: Sequence[Cell], effort: Effort, file: PointFile) -> dict[Cell, Choice]:
    """The best layout of each cell, and its cap."""
    tried: dict[Cell, dict[tuple[int, int | None], float]] = {c: {} for c in cells}
    every = {c: candidates(c) for c in cells}

    def simulate(wanted: dict[Cell, list[tuple[int, int | None]]], title: str) -> None:
        points = {
            (c, place): _point(c, every[c][place[0]], place[1], TUNING_SEED, effort.tuning_steps)
            for c, places in wanted.items()
            for place in places
        }
        found = measure(points.values(), file, title=title)
        for (c, place), point in points.items():
            tried[c][place] = found[point].tokens_per_s

    simulate(
        {c: [(i, first_cap(c, every[c][i])) for i in first_layouts(every[c], effort.layouts)] for c in cells},
        "tuning: layouts",
    )
    for _ in range(effort.rounds):
        near = {c: neighbours(every[c], best_of(tried[c])[0]) for c in cells}
        simulate(
            {
                c: [(i, cap) for i in near[c] if (i, cap := first_cap(c, every[c][i])) not in tried[c]]
                for c in cells
            },
            "tuning: their neighbours",
        )
    simulate(
        {
            c: [(i, cap) for i in [best_of(tried[c])[0]] for cap in _caps(every[c][i], effort.caps)]
            for c in cells
            if c.system.policy == "strict_queue"
        },
        "tuning: caps",
    )
    return {
        c: Choice(
            candidate=every[c][best[0]],
            cap=best[1],
            tried=len(tried[c]),
            most=max(candidate.bounds.least for candidate in every[c]),
        )
        for c in cells
        for best in [best_of(tried[c])]
    }


def best_of(tried: dict[tuple[int, int | None], float]) -> tuple[int, int | None]:
    """The fastest; of equals the one that the bounds promised more of."""
    return max(tried, key=lambda place: (tried[place], -place[0]))


def candidates(c: Cell) -> list[Candidate]:
    """Layouts, the most promising first."""
    shape = "sync" if c.system.policy == "sync" else "staleflow"
    return list(_candidates(c.overrides, c.gpus, c.bound, shape))


@cache
def _candidates(overrides: tuple[str, ...], gpus: int, bound: int, policy: str) -> tuple[Candidate, ...]:
    config = load_config([], [*overrides, f"coordination.policy={policy}"], {}, simulated=True)
    # By the bounds alone, which are the same for every system: what a pull costs is a matter of policy.
    found = [replace(candidate, pull_s=0.0) for candidate in find_candidates(config, gpus, [bound])]
    return tuple(sorted(found, key=lambda candidate: candidate.rank))


def first_layouts(every: Sequence[Candidate], most: int) -> list[int]:
    """The most promising layout for each number of GPUs an instance, at most so many."""
    found: dict[int, int] = {}
    for i, candidate in enumerate(every):
        found.setdefault(candidate.layout.tensor_parallel, i)
    return list(found.values())[:most]


def neighbours(every: Sequence[Candidate], place: int) -> list[int]:
    """Layouts with as many GPUs an instance, and about 1 / `STRIDE` of all GPUs more or fewer to generate."""
    layout = every[place].layout
    stride = (layout.rollout_gpus + layout.training_gpus) / STRIDE
    same = [i for i, other in enumerate(every) if other.layout.tensor_parallel == layout.tensor_parallel]
    more = {i: every[i].layout.rollout_gpus - layout.rollout_gpus for i in same}
    below = [i for i in same if more[i] <= -stride]
    above = [i for i in same if more[i] >= stride]
    nearest = (max(below, key=more.__getitem__, default=None), min(above, key=more.__getitem__, default=None))
    return [i for i in nearest if i is not None]


def first_cap(c: Cell, candidate: Candidate) -> int | None:
    """The cap of `strict_queue` while layouts are compared; None: it has none."""
    return scaled_cap(candidate, FIRST_CAP) if c.system.policy == "strict_queue" else None


def scaled_cap(candidate: Candidate, share: float) -> int:
    """Trajectories of an instance: a share of the load that just fits it."""
    return max(1, round(share * candidate.bounds.best_running))


def _caps(candidate: Candidate, shares: Sequence[float]) -> list[int | None]:
    return [scaled_cap(candidate, share) for share in shares]


def _point(c: Cell, candidate: Candidate, cap: int | None, seed: int, measured: int) -> Point:
    layout = candidate.layout
    return Point(
        overrides=(
            *c.overrides,
            f"coordination.policy={c.system.policy}",
            *c.system.overrides,
            f"staleness.bound={c.bound}",
            f"simulation.rollout_gpus={layout.rollout_gpus}",
            f"simulation.tensor_parallel={layout.tensor_parallel}",
            f"simulation.training_gpus={layout.training_gpus}",
            *(() if cap is None else (f"coordination.routing.max_per_instance={cap}",)),
            f"run.seed={seed}",
        ),
        skip=beginning(c.bound),
        measured=whole_rounds(measured, c.bound),
    )
