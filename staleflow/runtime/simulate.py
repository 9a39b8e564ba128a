"""Simulated runs from plain values, to compare policies on the same work: the run loop on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from staleflow.coordination.batches import BatchSettings, GroupFilter
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.policies import PolicySettings, build_coordinator, effective_bound
from staleflow.coordination.stragglers import StragglerRule
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import LastBatch, Start
from staleflow.runtime.assembly.simulated import run_simulation
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.settings import ClusterSettings
from staleflow.telemetry.events import Listener


def simulate(
    coordinator: Coordinator,
    cluster: ClusterSettings,
    *,
    bound: int,
    batch_size: int,
    steps: int,
    costs: OnlineCosts | None = None,
    spare_groups: int = 0,
    stragglers: StragglerRule | None = None,
    last_batch: LastBatch = "train",
    expected_response: int | None = None,
    group_filter: GroupFilter | None = None,
    max_seconds: float | None = None,
    ledger: Path | None = None,
    listeners: Sequence[Listener] = (),
) -> SimulationResult:
    """Run `steps` training steps of `batch_size` groups under the staleness bound, in simulated time.

    `coordinator` must be a fresh one. `costs`: what the coordinator thinks the instances cost (None: exactly
    what they do cost). `spare_groups`: redundant groups at once; redundant members are
    `ClusterSettings.surplus`. `expected_response`: tokens expected of a response before one has been seen
    (None: a quarter of max_new_tokens, as in a run). `ledger`: a new file for the records.
    Raises RunFailed when nothing can go on.
    """
    control = Control(
        buffer=StalenessBuffer(bound=bound, batch_size=batch_size, spare_limit=spare_groups),
        coordinator=coordinator,
        batches=BatchSettings(steps=steps, group_size=cluster.group_size, last_batch=last_batch),
        # Simulated instances never lose a trajectory without saying so, and report lengths rarely.
        patience=Patience(stall_after_s=math.inf),
        expected_response=expected_response or max(1, cluster.max_new_tokens // 4),
        group_filter=group_filter,
        stragglers=stragglers,
        costs=costs or OnlineCosts(cluster.costs, refine=False),
    )
    opening = Start(
        bound=bound,
        batch_size=batch_size,
        group_size=cluster.group_size,
        last_batch=last_batch,
        spare_limit=spare_groups,
    )
    return run_simulation(
        control,
        cluster,
        steps=steps,
        opening=opening,
        ledger=ledger,
        listeners=listeners,
        max_seconds=max_seconds,
    )


def simulate_policy(
    policy: str,
    cluster: ClusterSettings,
    *,
    bound: int,
    batch_size: int,
    steps: int,
    tuning: PolicySettings | None = None,
    max_seconds: float | None = None,
    ledger: Path | None = None,
    listeners: Sequence[Listener] = (),
) -> SimulationResult:
    """`simulate` with a policy by its name, at the bound that it keeps."""
    tuning = replace(tuning or PolicySettings(), recompute=cluster.on_pull == "recompute")
    return simulate(
        build_coordinator(policy, tuning),
        cluster,
        bound=effective_bound(policy, bound),
        batch_size=batch_size,
        steps=steps,
        max_seconds=max_seconds,
        ledger=ledger,
        listeners=listeners,
    )


def compare(
    policies: Mapping[str, tuple[str, PolicySettings]],
    clusters: Sequence[ClusterSettings],
    *,
    bound: int,
    batch_size: int,
    steps: int,
    skip: int,
    leave: int,
) -> dict[str, list[dict[str, float]]]:
    """Each policy (a label, its name, its tuning) on each cluster, which differ by the seed of their lengths.

    Returns the `summary` of each run by label, in the order of the clusters.
    """
    return {
        label: [
            summary(
                simulate_policy(
                    policy, cluster, bound=bound, batch_size=batch_size, steps=steps, tuning=tuning
                ),
                skip=skip,
                leave=leave,
            )
            for cluster in clusters
        ]
        for label, (policy, tuning) in policies.items()
    }


def summary(result: SimulationResult, *, skip: int = 0, leave: int = 0) -> dict[str, float]:
    """The numbers to compare runs by; `skip` and `leave` as in `SimulationResult.throughput`."""
    return {
        "tokens_per_s": result.throughput(skip=skip, leave=leave),
        "seconds": result.seconds,
        "steps": len(result.steps),
        "trainer_idle": result.trainer_idle_share,
        "instances_idle": result.instances_idle_share,
        "pulling": _share([row.pulling for row in result.instances], [row.up for row in result.instances]),
        "running_mean": _share([row.running_mean for row in result.instances], [1.0] * len(result.instances)),
        "staleness_mean": result.staleness_mean,
        "staleness_max": result.staleness_max,
        "preemptions": result.preemptions,
        **{f"{kind}s": count for kind, count in result.commands.items()},
        "prefilled": result.prefilled,
        "cycles": result.cycles,
    }


def _share(parts: Sequence[float], wholes: Sequence[float]) -> float:
    return sum(parts) / sum(wholes) if sum(wholes) > 0 else 0.0
