"""What `Control` costs at one size of cluster: a cold fill, then intervals in steady state.

Each point is measured in a process of its own, so that none inherits another's heap: with hundreds of
thousands of live objects the garbage collector is part of the cost. Its settings are those of a run, Python's
own. Seconds are CPU seconds of the one thread, for the machine may be shared.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression

from staleflow.coordination.cost_model import CostModel
from staleflow.experiments.synthetic_cluster import GROUP_SIZE, LIFE, Interval, SyntheticCluster

BOUND = 7
WARM_UP = 20
"""Intervals after the cold fill that are not counted."""
MOST_INTERVALS = 3000
FULL_BATCHES = 1.3
"""Groups in the buffer, finished ones included, for each that waits or runs."""
LARGE_INSTANCE = CostModel(k1=4e-9, k2=8e-3, k3=2e-5, k4=1e-3, prefill=2e-5, pull=1.0)
"""An instance that gains from hundreds of trajectories, as a data centre's GPU does with a model of some
billion parameters: loading weights takes 8 ms a step, which 400 trajectories share before arithmetic takes
longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """A size of cluster."""

    instances: int
    pending: int
    """Trajectories that wait in the trajectory server."""
    per_instance: int = 250
    """Trajectories that run on each."""
    steps: int = 2
    """Training steps that are measured, as far as `MOST_INTERVALS` reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was measured at a point."""

    instances: int
    pending: int
    routes: int
    """Of the cold fill."""
    cold_fill_s: float
    intervals: int
    pushes: int
    cycle_p50_ms: float
    cycle_p99_ms: float
    cycle_max_ms: float
    report_us: float
    """`Control.handle(Reported)`, mean."""
    reports_ms: float
    """The same for all reports of an interval, mean."""
    other_us: float
    """`Control.handle` of any other event, mean."""
    commands: float
    """In an interval, mean."""
    heap_ms: float
    """Settling the heap once a training step, mean of those seen."""


def measure_all(points: list[ClusterSize]) -> list[Cost]:
    """Each point in a process of its own, one after the other."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(measure, points))


def measure(point: ClusterSize) -> Cost:
    """Fill the cluster, then let intervals pass."""
    running = point.instances * point.per_instance
    batch_size = -(-int(FULL_BATCHES * running + point.pending) // (GROUP_SIZE * BOUND))
    cluster = build_cluster(point, batch_size)
    cold_fill_s, routes = cluster.cold_fill()
    finishing = running / LIFE / GROUP_SIZE
    count = min(MOST_INTERVALS, round(point.steps * batch_size / finishing))
    for _ in range(WARM_UP):
        cluster.interval()
    seen = [cluster.interval() for _ in range(count)]
    return _summary(point, cluster, cold_fill_s, routes, seen)


def build_cluster(point: ClusterSize, batch_size: int) -> SyntheticCluster:
    """`Control` as a run with policy staleflow builds it, in front of synthetic instances."""
    from staleflow.config import load_config
    from staleflow.protocol.records import Start
    from staleflow.runtime.assembly import build_control
    from staleflow.runtime.start import first_start
    from staleflow.storage.cost_file import save_cost_model

    kv_capacity = 8000 * point.per_instance
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        save_cost_model(costs, LARGE_INSTANCE, {})
        config = load_config(
            [],
            [
                f"staleness.bound={BOUND}",
                f"data.batch_size={batch_size}",
                f"data.group_size={GROUP_SIZE}",
                "run.steps=1000000",
                f"rollout.instances={point.instances}",
                f"rollout.max_running={point.per_instance}",
                f"rollout.kv_capacity_tokens={kv_capacity}",
                "rollout.max_new_tokens=8192",
                "training.micro_batch_tokens=16384",
                f"coordination.cost_model={costs}",
            ],
            {},
        )
        opening = Start(
            bound=BOUND, batch_size=batch_size, group_size=GROUP_SIZE, last_batch="train", spare_limit=0
        )
        control = build_control(config, first_start(opening))
    return SyntheticCluster(
        control,
        instances=point.instances,
        max_running=point.per_instance,
        kv_capacity=kv_capacity,
        pending=point.pending,
        costs=LARGE_INSTANCE,
    )


def exponent(sizes: list[int], costs: list[float]) -> float:
    """The e of cost ~ size ** e, by least squares on logarithms."""
    from math import log

    return linear_regression([log(size) for size in sizes], [log(cost) for cost in costs]).slope


def _summary(
    point: ClusterSize, cluster: SyntheticCluster, cold_fill_s: float, routes: int, seen: list[Interval]
) -> Cost:
    cycles = sorted(i.cycle_s * 1e3 for i in seen)
    return Cost(
        instances=point.instances,
        pending=point.pending,
        routes=routes,
        cold_fill_s=cold_fill_s,
        intervals=len(seen),
        pushes=cluster.pushes,
        cycle_p50_ms=_quantile(cycles, 0.5),
        cycle_p99_ms=_quantile(cycles, 0.99),
        cycle_max_ms=cycles[-1],
        report_us=1e6 * sum(i.reports_s for i in seen) / sum(i.reports for i in seen),
        reports_ms=fmean(i.reports_s * 1e3 for i in seen),
        other_us=1e6 * sum(i.others_s for i in seen) / max(1, sum(i.others for i in seen)),
        commands=fmean(i.commands for i in seen),
        heap_ms=fmean(settled) if (settled := [i.heap_s * 1e3 for i in seen if i.heap_s]) else 0.0,
    )


def _quantile(ascending: list[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
