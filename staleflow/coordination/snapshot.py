"""What the coordinator sees.

A snapshot is read-only: the coordinator decides on a speculative copy (`speculative.py`) and `Control`
applies what it decided. Its parts are shared with `Control` and not copied, so that a cycle costs what
changed, not what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from staleflow.coordination.commands import Command
from staleflow.coordination.pending import PendingTrajectories
from staleflow.protocol.placement import DeadlineCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """One instance as it last reported itself."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An instance and the commands to it that it has not acknowledged, oldest first."""

    snapshot: InstanceSnapshot
    outstanding: tuple[Command, ...]
    next_seq: int


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
    expected_growth: int
    """Tokens a fresh trajectory is expected to generate."""
