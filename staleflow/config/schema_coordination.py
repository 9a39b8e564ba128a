"""The section `coordination` of the schema: policies and their strategies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from staleflow.config.base import MigrationName, RoutingName, Section, SynchronizationName


class Routing(Section):
    """Which trajectory goes to which instance."""

    strategy: RoutingName | None = None
    """waterfall: largest marginal throughput gain; naive: least loaded; or the dotted path of your own class
    (docs/extending.md). Null: what the policy prescribes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a strategy of your own."""
    mu: float = Field(default=0.3, ge=0, le=1)
    """μ of waterfall: a trajectory waits until an instance offers at least this share of the throughput gain
    that it would bring on an empty instance."""
    kv_headroom: float = Field(default=0.1, ge=0, lt=1)
    """Share of a KV cache that waterfall and naive leave free, because final lengths are only estimates."""
    max_per_instance: int | None = Field(default=None, ge=1)
    """Most trajectories on an instance under policy strict_queue. Null: rollout.max_running."""


class Synchronization(Section):
    """When an instance pulls newer weights."""

    strategy: SynchronizationName | None = None
    """selective: when a pull unlocks routing that is worth its cost; naive: every instance pulls each new
    version at once; or the dotted path of your own class. Null: what the policy prescribes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a strategy of your own."""


class Migration(Section):
    """When running trajectories move to another instance."""

    strategy: MigrationName | None = None
    """cost_aware: when the saving exceeds the new prefill; naive: never; or the dotted path of your own
    class. Null: what the policy prescribes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a strategy of your own."""
    phi_wait: int = Field(default=3, ge=0)
    """φ_wait: trajectories that may wait inside an instance before some of them are moved to others."""
    psi_throughput: float = Field(default=5.0, ge=1)
    """ψ: ratio of the fastest to the slowest instance's throughput above which running trajectories move."""
    rest_s: float = Field(default=2.0, ge=0)
    """Seconds after each Route during which a running trajectory is not moved, whatever that would save."""


class Stragglers(Section):
    """The last unfinished trajectories that training waits for while nothing else can start."""

    action: Literal["wait", "retry", "truncate"] = "wait"
    """wait: let them finish; retry: drop them and sample again, once; truncate: train on the tokens so far.
    retry and truncate cut off long responses, which biases training; the report shows by how much.
    Trajectories shorter than the mean response are left to finish."""
    at_most: int = Field(default=4, ge=1)
    """Act only when at most this many trajectories are unfinished."""


class Coordination(Section):
    """Routing, synchronization and migration of trajectories under the staleness bound."""

    policy: Literal["staleflow", "strict_queue", "strict", "one_step", "sync"] = "staleflow"
    """staleflow, or a baseline in the same system: strict_queue (one central queue with a concurrency cap) or
    strict (each group dispatched once), both limited by batches ahead; one_step (a barrier, one step ahead);
    sync."""
    interval_ms: float = Field(default=50.0, gt=0)
    """Milliseconds between coordination cycles."""
    cost_model: str | None = None
    """File written by `staleflow profile`. Null: built-in start values, refined during the run."""
    refine_costs: bool = True
    """Refit the cost model to measurements of the instances; false: keep the file's or the start values."""
    routing: Routing = Routing()
    synchronization: Synchronization = Synchronization()
    migration: Migration = Migration()
    stragglers: Stragglers = Stragglers()
