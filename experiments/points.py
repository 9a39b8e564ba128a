"""Simulated runs as points of a study: made once, in several processes, and kept.

Invariants: a point is what would be said on the command line of `staleflow simulate`, and nothing else
enters; a finished point is in the file before the next one is looked at, so that a study that was interrupted
goes on; a file is never used for a point of other settings.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from staleflow.config import load_config
from staleflow.errors import RunFailed
from staleflow.reporting.spread import Spread
from staleflow.runtime.assembly import opening_record
from staleflow.runtime.assembly.simulated import StopAfter, run_simulation, simulated_control
from staleflow.runtime.start import first_start
from staleflow.simulation.bounds import SIDES, find_bounds
from staleflow.simulation.hardware import cluster_settings
from staleflow.simulation.result import SimulationResult

MANY_STEPS = 1_000_000
"""More than a point makes: it is stopped, so that groups are drawn until its end."""
PATIENCE = 50.0
"""Times the shortest possible period after which a step that never comes is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulated run."""

    overrides: tuple[str, ...]
    """`key.path=value`, over the default config."""
    skip: int
    """First steps that are left out: those of a cluster that fills up."""
    measured: int
    """Steps after them."""

    @property
    def key(self) -> str:
        """Names it in the file."""
        return json.dumps([self.overrides, self.skip, self.measured])


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """What a point showed. Its steps are those after the skipped ones."""

    tokens_per_s: float
    """Generated tokens trained on."""
    step_s: float
    update_s: float
    """Of a step, push included."""
    trainer_idle: float
    """Share of the time in which it waited for a batch."""
    instances_idle: float
    """Share of the time, the beginning included, in which an instance neither decoded nor pulled."""
    pulling: float
    """Share of the instances' time, likewise."""
    staleness_mean: float
    staleness_max: int
    running_mean: float
    """Trajectories in the batch of an instance."""
    preemptions: int
    interrupts: int
    rollout: float
    trainer: float
    latency: float
    """Bounds in tokens per second."""
    cpu_s: float
    """What the simulation took."""

    @property
    def least(self) -> float:
        """The bound that binds."""
        return min(self.rollout, self.trainer, self.latency)

    @property
    def binding(self) -> str:
        """Its name."""
        return min(SIDES, key=lambda side: float(getattr(self, side)))


def run_point(point: Point) -> PointResult:
    """Raises UserError for settings that cannot work, and RunFailed for a run that comes to no end."""
    began = time.process_time()
    config = load_config([], [*point.overrides, f"run.steps={MANY_STEPS}"], {}, simulated=True)
    settings, opening = cluster_settings(config), opening_record(config)
    bounds = find_bounds(settings, bound=opening.bound, batch_size=opening.batch_size)
    steps = point.skip + point.measured
    result = run_simulation(
        simulated_control(config, settings, first_start(opening)),
        settings,
        steps=config.run.steps,
        opening=opening,
        listeners=[StopAfter(steps)],
        max_seconds=PATIENCE * steps * bounds.seconds(),
    )
    if len(result.steps) < steps:
        raise RunFailed(
            f"{len(result.steps)} of {steps} steps were done in {result.seconds:,.0f} simulated seconds: "
            f"{' '.join(point.overrides)}"
        )
    return measured(
        result,
        skip=point.skip,
        steps=steps,
        bounds={side: bounds.rate(side) for side in SIDES},
        cpu_s=time.process_time() - began,
    )


def measured(
    result: SimulationResult, *, skip: int, steps: int, bounds: Mapping[str, float], cpu_s: float
) -> PointResult:
    """The steps `skip` to `steps` of a result."""
    rows = result.steps[skip:steps]
    seconds = rows[-1].ended - (result.steps[skip - 1].ended if skip else 0.0)
    trajectories = sum(row.trajectories for row in rows)
    up = sum(row.up for row in result.instances)
    return PointResult(
        tokens_per_s=sum(row.tokens for row in rows) / seconds,
        step_s=seconds / len(rows),
        update_s=sum(row.ended - row.began for row in rows) / len(rows),
        trainer_idle=sum(row.waited for row in rows) / seconds,
        instances_idle=result.instances_idle_share,
        pulling=sum(row.pulling for row in result.instances) / up if up else 0.0,
        staleness_mean=sum(row.staleness_mean * row.trajectories for row in rows) / trajectories,
        staleness_max=max(row.staleness_max for row in rows),
        running_mean=sum(row.running_mean for row in result.instances) / len(result.instances),
        preemptions=result.preemptions,
        interrupts=result.commands.get("interrupt", 0),
        rollout=bounds["rollout"],
        trainer=bounds["trainer"],
        latency=bounds["latency"],
        cpu_s=cpu_s,
    )


# ---------------------------------------------------------------------- many of them


class PointFile:
    """Finished points, one JSON object a line; a torn last line is a point that was not finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._points: dict[str, PointResult] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    document = json.loads(line)
                    self._points[document["point"]] = PointResult(**document["measured"])
                except (ValueError, KeyError, TypeError):
                    continue  # torn, or of another version: made again

    def find(self, point: Point) -> PointResult | None:
        """What was measured, if it was."""
        return self._points.get(point.key)

    def add(self, point: Point, found: PointResult) -> None:
        """Keep a point; it is on disk when this returns."""
        self._points[point.key] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.is_file() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                ("\n" if torn else "") + json.dumps({"point": point.key, "measured": asdict(found)}) + "\n"
            )


def measure(points: Iterable[Point], file: PointFile, *, title: str) -> dict[Point, PointResult]:
    """All points, those that are not in the file yet made in as many processes as there are cores.

    Raises what the first point that fails raises; what is finished by then is kept.
    """
    wanted = list(dict.fromkeys(points))
    missing = [point for point in wanted if file.find(point) is None]
    if missing:
        _make(missing, file, title)
    return {point: found for point in wanted if (found := file.find(point)) is not None}


def _make(points: Sequence[Point], file: PointFile, title: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    processes = min(os.cpu_count() or 1, len(points))
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=len(points))
            futures: dict[Future[PointResult], Point] = {pool.submit(run_point, p): p for p in points}
            for future in as_completed(futures):
                file.add(futures[future], future.result())
                progress.advance(task)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------------- over seeds


def rate_text(rate: Spread) -> str:
    """A rate with its least and most."""
    if rate.median == 0 or not math.isfinite(rate.median):
        return f"{rate.median:g}"
    return f"{rate.median:,.0f} ({rate.least:,.0f} to {rate.most:,.0f})"


def ratio_text(ratio: Spread) -> str:
    """A speed-up with its least and most."""
    return f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"


def speedup(of: Sequence[PointResult], over: Sequence[PointResult]) -> Spread:
    """Ratios of trained tokens a second, seed by seed: the same seed is the same work."""
    return Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in zip(of, over, strict=True)])


def middle(runs: Sequence[PointResult]) -> PointResult:
    """Every figure's median over seeds, each by itself."""
    values = {f.name: median(getattr(run, f.name) for run in runs) for f in fields(PointResult)}
    return PointResult(**values)
