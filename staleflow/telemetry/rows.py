"""The two things a run tells the outside: rows (kept for ever) and a status (the picture of this moment)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RowKind = Literal["train", "eval", "instances", "event", "summary"]
Values = dict[str, float | int | str]
"""By metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of metrics.jsonl: `{"kind": ..., "time": ..., **values}`."""

    kind: RowKind
    """train: one per training step, has `train/step`. eval: one per evaluated version, has
    `eval/weight_version`. instances: a sample of `instance/<i>/...` about once a second, has
    `run/seconds`. event: something worth a line (`event/name`, `event/text`). summary: last line of a
    run, token balance and totals."""
    time: float
    """Seconds since the epoch, from the run's clock."""
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    instance: str
    version: int
    running: int
    waiting: int
    kv_usage: float
    """0 to 1."""
    tokens_per_s: float
    state: str
    """`decoding`, `idle`, `pulling`, `lost` or `starting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """One virtual staleness buffer under earliest-deadline-first placement."""

    step: int
    """V_buf."""
    capacity: int
    reserved: int
    """Groups placed here that are not occupied yet."""
    occupied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The picture of this moment, for the live console."""

    run_name: str
    policy: str
    bound: int
    step: int
    """Next training step."""
    steps: int
    version: int
    """Newest version in the parameter server."""
    phase: str
    """`starting`, `running`, `finishing step`, `saving`, `evaluating`, `done`."""
    seconds: float
    buffers: tuple[BufferStatus, ...] = ()
    instances: tuple[InstanceStatus, ...] = ()
    trainer: str = "idle"
    """What the trainer is doing, or why it waits: one short sentence."""
    waiting_for: str = ""
    """The current reason for waiting, naming who is waited for."""
    pending: int = 0
    """Trajectories in the trajectory server."""
    scoring: int = 0
    in_flight: int = 0
    tokens_per_s: float = 0.0
    staleness_max: int | None = None
    staleness_mean: float | None = None
    reward_mean: tuple[float, ...] = ()
    """One value per finished step."""
    evals: tuple[tuple[int, float], ...] = ()
    """(weight version, sampled accuracy)."""
    tokens: dict[str, int] = field(default_factory=dict)
    """generated, trained, filtered, aborted, discarded, in_flight: generated is the sum of the others."""
