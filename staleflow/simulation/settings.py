"""Settings of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staleflow.coordination.cost_model import CostModel
from staleflow.errors import UserError
from staleflow.rollout.engine import OnPull
from staleflow.simulation.response_lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCosts:
    """Times of a training step and its push, in seconds."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    """Per token of prompts and responses."""
    push_s: float = 0.0
    """From the end of an update until its weights can be pulled; the next update waits for this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """An instance dies and restarts as a new incarnation."""

    at: float
    """Seconds from the start."""
    instance: int
    """Counted from 0."""
    down_s: float | None
    """Seconds until it is up again; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `at` on, everything on an instance takes `factor` times as long."""

    at: float
    instance: int
    factor: float


def always_right(trajectory_id: str) -> float:
    """Reward 1 for every trajectory."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Plain values. Times in seconds, lengths and capacities in tokens."""

    instances: int
    kv_capacity: int
    """Tokens that each instance's KV cache holds."""
    max_running: int
    """Limit on the trajectories that an instance decodes at once."""
    costs: CostModel
    trainer: TrainerCosts
    group_size: int
    lengths: Lengths
    prompt_length: int
    max_new_tokens: int
    surplus: int = 0
    """Redundant members of each group."""
    on_pull: OnPull = "recompute"
    interval_s: float = 0.05
    """Minimum time between two coordination cycles; without news no cycle takes place."""
    command_s: float = 0.0
    """Latency from a decision to the instance (which applies it between two decode steps)."""
    report_s: float = 0.0
    """Latency from an instance to the coordinator."""
    progress_interval_s: float = 30.0
    """Period for reporting the lengths of running trajectories."""
    reward_s: float = 0.0
    """Time to score one trajectory."""
    reward_workers: int | None = None
    """Trajectories scored at the same time; None: unlimited."""
    reward: Callable[[str], float] = always_right
    """Raw reward by trajectory id."""
    prompts: int | None = None
    """Prompts in the source; None: unlimited."""
    outages: tuple[Outage, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    def __post_init__(self) -> None:
        if self.instances < 1 or self.max_running < 1 or self.group_size < 1 or self.interval_s <= 0:
            raise UserError(
                f"a simulated cluster needs instances >= 1, max_running >= 1, group_size >= 1 and "
                f"interval_s > 0, not {self.instances}, {self.max_running}, {self.group_size} and "
                f"{self.interval_s}"
            )
        longest = self.prompt_length + self.max_new_tokens
        if self.prompt_length < 1 or self.max_new_tokens < 1 or longest > self.kv_capacity:
            raise UserError(
                f"a KV cache of {self.kv_capacity} tokens cannot hold one whole trajectory: "
                f"{self.prompt_length} (prompt) + {self.max_new_tokens} (max_new_tokens) = {longest}"
            )
        changes: list[Outage | Slowdown] = [*self.outages, *self.slowdowns]
        for change in changes:
            if not 0 <= change.instance < self.instances or change.at < 0:
                raise UserError(
                    f"{change} must name an instance from 0 to {self.instances - 1} and a time of at least 0"
                )
        if any(slowdown.factor <= 0 for slowdown in self.slowdowns):
            raise UserError("the factor of a slowdown must be above 0")
