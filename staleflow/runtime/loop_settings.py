"""What the run loop needs to know of the config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Plain values; times in seconds."""

    steps: int
    interval_s: float
    """Least time between two coordination cycles, unless something stands still until the next one."""
    idle_s: float
    """Longest time that a poll waits: how soon a stop from outside is noticed. inf: until a message comes."""
    evaluate_every: int
    """Training steps between evaluations; 0: none."""
    evaluation_backlog: int
    """Versions that may wait while another is evaluated."""
    checkpoint_every: int | None
    """Training steps between checkpoints; 0: only at the end; None: never."""
    start_timeout_s: float
    multi_turn: bool = False
    """An environment is asked what follows when the model has ended its turn."""
