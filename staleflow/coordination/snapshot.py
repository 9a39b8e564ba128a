"""What the coordinator sees.

A snapshot is read-only: the coordinator decides on a speculative copy (`speculative.py`) and `Control`
applies what it decided. Its parts are shared with `Control` and not copied, so that a cycle costs what
changed, not what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.commands import Command
from staleflow.coordination.cost_model import START_VALUES, CostModel
from staleflow.coordination.pending import PendingTrajectories
from staleflow.protocol.placement import DeadlineCounts


class InstanceSnapshot(NamedTuple):
    """One instance as it last reported itself. A named tuple: one is made for every report."""

    instance: str
    incarnation: int
    revision: int
    """Changes whenever anything here does."""
    version: int
    """Loaded weight version."""
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    """Tokens."""
    max_running: int
    acked_seq: int
    generated_tokens: int = 0
    busy_seconds: float = 0.0


class InstanceView(NamedTuple):
    """An instance and the commands to it that it has not acknowledged, oldest first."""

    snapshot: InstanceSnapshot
    outstanding: tuple[Command, ...]
    next_seq: int


class Resident(NamedTuple):
    """A trajectory on an instance, as migration sees it. A named tuple, for it looks at many."""

    trajectory_id: str
    group_id: str
    group_version: int
    """V_group of its reservation."""
    length: int
    """Prompt and response tokens as last reported."""
    response: int
    """Response tokens among them."""
    routed_at: float
    """Time of the Route that brought it there."""
    routed_length: int
    """Its length then: what it has gained since is its progress there."""
    fruitless: int
    """Routes in a row, this one not counted, on which it gained nothing."""
    leaving: bool
    """An Interrupt to it is on its way."""


def nobody(instance: str) -> tuple[Resident, ...]:
    """An instance without trajectories."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the run at one moment."""

    now: float
    """Seconds on the caller's clock."""
    next_buffer: int
    newest_version: int
    """Newest complete version in the parameter server."""
    counts: DeadlineCounts
    """Firm entries by deadline; read, or copied, never changed."""
    reservable: int
    """Groups that may still be reserved before the run's last step."""
    pending: PendingTrajectories
    instances: Mapping[str, InstanceView]
    group_members: int
    """Trajectories that a group starts with."""
    expected_growth: int
    """Tokens a fresh trajectory is expected to generate."""
    expected_held: int = 0
    """Tokens, prompt included, that a running trajectory holds on average. 0: not known yet."""
    costs: CostModel = START_VALUES
    """What decoding costs on an instance, as known now."""
    spares_free: int = 0
    """Spare groups that may still be reserved."""
    resident: Callable[[str], tuple[Resident, ...]] = nobody
    """The trajectories of an instance in the order of their Routes; those that wait inside it come last."""
