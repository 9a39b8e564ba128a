"""What a rollout instance reports. Ids, lengths and versions only: payload goes beside it, not in it.

Named tuples, for a run makes as many as trajectories: quicker to make than frozen dataclasses.
"""

from __future__ import annotations

from typing import NamedTuple


class Rejection(NamedTuple):
    """A command that the instance refused; it changed nothing there."""

    seq: int
    trajectory_id: str | None
    """None for a Pull."""
    reason: str
    stale_version: bool = False
    """A Route refused because the loaded version is lower than min_version: no failure of the trajectory."""


class TrajectoryReport(NamedTuple):
    """The state of one trajectory that left the engine (finished or interrupted)."""

    trajectory_id: str
    length: int
    """Prompt and response tokens."""
    min_version: int | None
    """V_traj; None when nothing was generated."""
    finish_reason: str | None = None
    """None for an interrupted trajectory."""


class InstanceReport(NamedTuple):
    """All that changed on one instance since its last report, and its load now."""

    instance: str
    incarnation: int
    revision: int
    """Grows by one with every report of an incarnation."""
    version: int
    """Loaded weight version."""
    acked_seq: int
    """Every command up to this sequence number was applied or rejected."""
    rejections: tuple[Rejection, ...] = ()
    finished: tuple[TrajectoryReport, ...] = ()
    interrupted: tuple[TrajectoryReport, ...] = ()
    aborted: tuple[str, ...] = ()
    lengths: tuple[tuple[str, int], ...] = ()
    """Lengths of trajectories still there that grew since they were last listed (sent now and then)."""
    running: int = 0
    waiting: int = 0
    """In the engine's own queue, admitted by the instance but not in the KV cache."""
    kv_tokens: int = 0
    kv_capacity: int = 0
    """Tokens the KV cache can hold."""
    preemptions: int = 0
    """Since the incarnation started."""
    generated_tokens: int = 0
    """Since the incarnation started."""
    busy_seconds: float = 0.0
    """Time spent decoding since the incarnation started."""
    pull_seconds: float = 0.0
    """Time decoding stood still for pulls since the incarnation started, the rebuilding of KV included."""
    rebuilt_tokens: int = 0
    """Tokens of running trajectories whose KV was rebuilt in pulls since the incarnation started."""
    pulls: int = 0
    """Pulls that loaded weights since the incarnation started."""
    interrupt_seconds: float = 0.0
    """Time spent taking trajectories out for Interrupts since the incarnation started."""
    abort_seconds: float = 0.0
    """The same for Aborts."""
    route_seconds: float = 0.0
    """Time spent taking trajectories in since the incarnation started (their prefill is decoding time)."""
    decode_steps: int = 0
    """Steps that decoded something since the incarnation started; `busy_seconds` is their time."""
    running_steps: int = 0
    """Sum over those steps of the trajectories decoded."""
    kv_token_steps: int = 0
    """Sum over those steps of the tokens of these trajectories, before each step's new ones."""
    prefilled_tokens: int = 0
    """Tokens whose KV was built in those steps: trajectories that joined. Not those of a pull."""
