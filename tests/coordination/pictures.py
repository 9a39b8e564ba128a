"""Snapshots made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staleflow.coordination.actions import Command, Interrupt, Pull, Route
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.snapshot import (
    InstanceSnapshot,
    InstanceView,
    PendingTrajectories,
    PendingTrajectory,
    Resident,
    Snapshot,
)
from staleflow.coordination.speculative import SpeculativeState, speculate
from staleflow.protocol.buffer import StalenessBuffer

ATTENTION_BOUND = CostModel(k1=0.001, k2=0.01, k3=0.0, k4=0.0, prefill=0.001, pull=1.0)
"""A step takes 10 ms and 1 ms for each cached token: T = n / (0.001 kv + 0.01)."""


def view(name: str, version: int, *outstanding: Command, **values: Any) -> InstanceView:
    fields = {
        "revision": 1,
        "running": 0,
        "waiting": 0,
        "kv_tokens": 0,
        "kv_capacity": 1000,
        "max_running": 64,
        "acked_seq": 0,
    }
    snapshot = InstanceSnapshot(instance=name, incarnation=1, version=version, **(fields | values))
    return InstanceView(snapshot=snapshot, outstanding=outstanding, next_seq=1 + len(outstanding))


def waiting(*items: tuple[str, str, int | None, int]) -> PendingTrajectories:
    """(trajectory, group, V_group, length)."""
    queue = PendingTrajectories()
    for trajectory, group, version, length in items:
        queue.add(
            PendingTrajectory(trajectory_id=trajectory, group_id=group, group_version=version, length=length)
        )
    return queue


def resident(name: str, *, version: int = 0, length: int = 10, **values: Any) -> Resident:
    fields = {"response": length, "routed_at": 0.0, "routed_length": 0, "fruitless": 0, "leaving": False}
    return Resident(
        trajectory_id=name, group_id=f"g-{name}", group_version=version, length=length, **(fields | values)
    )


def picture(
    buffer: StalenessBuffer,
    instances: Sequence[InstanceView],
    pending: PendingTrajectories | None = None,
    *,
    newest: int,
    residents: Mapping[str, tuple[Resident, ...]] | None = None,
    **values: Any,
) -> Snapshot:
    there = residents or {}
    fields = {
        "now": 100.0,
        "reservable": 100,
        "group_members": 1,
        "expected_growth": 20,
        "expected_held": 10,
        "costs": ATTENTION_BOUND,
    }
    return Snapshot(
        next_buffer=buffer.next_buffer,
        newest_version=newest,
        counts=buffer.counts(),
        pending=pending if pending is not None else PendingTrajectories(),
        instances={v.snapshot.instance: v for v in instances},
        resident=lambda name: there.get(name, ()),
        **(fields | values),
    )


def state_of(snapshot: Snapshot, fresh_groups: int | None = None) -> SpeculativeState:
    views = snapshot.instances.items()
    return SpeculativeState(snapshot, {name: speculate(view) for name, view in views}, fresh_groups)


def routes(state: SpeculativeState) -> list[tuple[str, str]]:
    return [(c.trajectory_id, c.instance) for c in state.commands if isinstance(c, Route)]


def pulls(state: SpeculativeState) -> list[str]:
    return [c.instance for c in state.commands if isinstance(c, Pull)]


def interrupts(state: SpeculativeState) -> list[tuple[str, str]]:
    return [(c.trajectory_id, c.instance) for c in state.commands if isinstance(c, Interrupt)]
