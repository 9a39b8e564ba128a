"""What staleflow itself costs: protocol, coordination, parameter server, and their share of a real run.

The goals are for one core. Everything is measured, none of it is estimated from a smaller size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from staleflow.experiments import coordination_cost, protocol_rate, run_share, transfer
from staleflow.experiments.coordination_cost import ClusterSize, Cost, exponent
from staleflow.experiments.growth_figure import growth_figure
from staleflow.experiments.study import Finding, Options, Result, Study, Table

INSTANCES = (16, 128, 1024)
PENDING = (1_000, 10_000, 100_000)
QUICK_INSTANCES = (4, 16, 64)
QUICK_PENDING = (500, 1_000, 2_000)
CYCLE_P50_MS, CYCLE_P99_MS, COLD_FILL_S, RUN_SHARE = 20.0, 100.0, 5.0, 0.01
"""Goals."""

COLUMNS = (
    "instances",
    "pending",
    "cycle p50 ms",
    "cycle p99 ms",
    "cycle max ms",
    "handle(report) µs",
    "all reports ms",
    "handle(other) µs",
    "commands",
    "heap, a step, ms",
    "cold fill s",
    "routes",
    "intervals",
    "pushes",
)


def measure_overhead(options: Options) -> Result:
    """All parts, one after the other."""
    load_before = _load()
    options.say("a real run" if options.run is None else f"the run {options.run}")
    shares = _run(options)  # first, for it is what may turn out not to be there
    options.say("protocol transitions")
    protocol = protocol_rate.findings(options)
    options.say("parameter server")
    served = transfer.findings(options)
    costs = _coordination(options)
    by_instances, by_pending = _by_instances(costs), _by_pending(costs)
    return Result(
        findings=(*protocol, *_control(costs, options), *_growth(by_instances, by_pending), *served, *shares),
        tables=(Table(title="Control by size of cluster", columns=COLUMNS, rows=tuple(map(_row, costs))),),
        figures={"growth.svg": growth_figure(by_instances, by_pending)},
        notes=(
            "Seconds of protocol and Control are CPU seconds of one thread, also in the run, where they are "
            "shares of its wall time; those of copies and of decoding that stood still are wall time.",
            f"Clusters are synthetic: {ClusterSize(instances=1, pending=0).per_instance} trajectories run on "
            "each instance for 40 s on average, each reports in every interval of 50 ms, and training "
            "steps follow as fast as groups are finished. What they talk to is the real Control.",
            f"Other work on the machine: load average {load_before:.1f} before, {_load():.1f} after, on "
            f"{os.cpu_count()} cores. CPU seconds do not count waiting for a core, but a shared cache slows "
            "them down.",
            *(
                ("Quick: small sizes and a short run, so the goals of coordination are not judged.",)
                if options.quick
                else ()
            ),
        ),
    )


def _load() -> float:
    """Processes that want a core, over the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


# ---------------------------------------------------------------------- the parts


def _coordination(options: Options) -> list[Cost]:
    instances = QUICK_INSTANCES if options.quick else INSTANCES
    pending = QUICK_PENDING if options.quick else PENDING
    points = [ClusterSize(instances=n, pending=pending[-1]) for n in instances]
    points += [ClusterSize(instances=instances[-1], pending=p, steps=1) for p in pending[:-1]]
    if options.quick:
        points = [replace(point, per_instance=40, steps=1) for point in points]
    costs = []
    for point in points:
        options.say(f"Control with {point.instances:,} instances and {point.pending:,} waiting trajectories")
        costs += coordination_cost.measure_all([point])
    return costs


def _run(options: Options) -> tuple[Finding, ...]:
    share = run_share.share_of_run(options.run, steps=3 if options.quick else 12)
    judged = options.run is not None or not options.quick  # beginning weighs in a run of three steps
    note = f"{share.steps} steps in {share.wall_s:.0f} s, {share.instances:.1f} instances up on average"
    spent = (("step and handle", share.step + share.handle), ("step", share.step), ("handle", share.handle))
    return (
        *(
            Finding(
                name=f"{name}, of a run's wall time",
                value=value * 100,
                unit="%",
                goal=RUN_SHARE * 100 if judged and name == "step and handle" else None,
                note=note,
            )
            for name, value in spent
        ),
        *(
            Finding(
                name=f"decoding stood still for {kind.capitalize()}",
                value=value * 100,
                unit="%",
                note="of the instances' time in the same run",
            )
            for kind, value in share.still.items()
        ),
    )


# ---------------------------------------------------------------------- what they say


def _control(costs: Sequence[Cost], options: Options) -> tuple[Finding, ...]:
    """The goals are for the largest cluster; each size at the longest queue is shown."""
    findings: list[Finding] = []
    for cost in _by_instances(costs):
        judged = not options.quick and cost.instances == INSTANCES[-1]
        at = f"{cost.instances:,} instances, {cost.pending:,} waiting"
        findings += [
            Finding(
                name=f"cycle p50, {at}",
                value=cost.cycle_p50_ms,
                unit="ms",
                goal=CYCLE_P50_MS if judged else None,
                note=f"{cost.intervals} cycles, {cost.pushes} pushes among them",
            ),
            Finding(
                name=f"cycle p99, {at}",
                value=cost.cycle_p99_ms,
                unit="ms",
                goal=CYCLE_P99_MS if judged else None,
                note=f"the slowest took {cost.cycle_max_ms:.1f} ms",
            ),
            Finding(
                name=f"handle(Reported), {at}",
                value=cost.report_us,
                unit="µs",
                note="mean, of reports that tell all lengths once a second",
            ),
            Finding(
                name=f"cold fill, {at}",
                value=cost.cold_fill_s,
                unit="s",
                goal=COLD_FILL_S if judged else None,
                note=f"{cost.routes:,} Routes, effects included",
            ),
        ]
    return tuple(findings)


def _growth(by_instances: Sequence[Cost], by_pending: Sequence[Cost]) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for along, costs in (("instances", by_instances), ("waiting trajectories", by_pending)):
        sizes = [c.instances if along == "instances" else c.pending for c in costs]
        measured = {
            "cycle p50": [c.cycle_p50_ms for c in costs],
            "all reports of an interval": [c.reports_ms for c in costs],
            "cold fill": [c.cold_fill_s for c in costs],
        }
        findings += [
            Finding(
                name=f"growth of {name} with {along}",
                value=exponent(sizes, values),
                unit="",
                note=f"exponent over {sizes[0]:,} to {sizes[-1]:,}",
            )
            for name, values in measured.items()
        ]
    return tuple(findings)


def _by_instances(costs: Sequence[Cost]) -> list[Cost]:
    """At the longest queue."""
    most = max(cost.pending for cost in costs)
    return sorted((c for c in costs if c.pending == most), key=lambda c: c.instances)


def _by_pending(costs: Sequence[Cost]) -> list[Cost]:
    """In the largest cluster."""
    most = max(cost.instances for cost in costs)
    return sorted((c for c in costs if c.instances == most), key=lambda c: c.pending)


def _row(cost: Cost) -> tuple[str | float, ...]:
    return (
        cost.instances,
        cost.pending,
        cost.cycle_p50_ms,
        cost.cycle_p99_ms,
        cost.cycle_max_ms,
        cost.report_us,
        cost.reports_ms,
        cost.other_us,
        cost.commands,
        cost.heap_ms,
        cost.cold_fill_s,
        cost.routes,
        cost.intervals,
        cost.pushes,
    )


OVERHEAD = Study(
    name="overhead",
    question="What does staleflow itself cost, and how does that grow?",
    script=measure_overhead,
)
