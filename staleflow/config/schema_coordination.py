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
    """μ of waterfall: a trajectory waits for at least this share of its gain on an empty instance."""
    kv_headroom: float = Field(default=0.1, ge=0, lt=1)
    """Share of a KV cache that waterfall and naive leave free, because lengths are only expected ones."""
    max_per_instance: int | None = Field(default=None, ge=1)
    """Most trajectories on an instance under policy strict_queue. Null: rollout.max_running."""


class Synchronization(Section):
    """When an instance pulls newer weights."""

    strategy: SynchronizationName | None = None
    """selective: where a pull unlocks routing and pays; naive: all, as soon as there is something newer; or
    the dotted path of your own class. Null: what the policy prescribes."""
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
    """φ_wait: trajectories that may wait inside an instance before some of them are taken elsewhere."""
    psi_throughput: float = Field(default=5.0, ge=1)
    """ψ: ratio of the fastest to the slowest instance's throughput above which running ones move."""
    rest_s: float = Field(default=2.0, ge=0)
    """Seconds after each Route in which a running trajectory is left alone, whatever a move would save."""


class Stragglers(Section):
    """The last unfinished trajectories that training waits for, when nothing else can be started."""

    action: Literal["wait", "retry", "truncate"] = "wait"
    """wait: let them finish; retry: drop, and sample anew once; truncate: train on what there is. Both of the
    latter cut off long responses, which biases: the report shows by how much. Those shorter than the mean
    response are waited for."""
    at_most: int = Field(default=4, ge=1)
    """Only when no more trajectories than this are unfinished."""


class Coordination(Section):
    """Routing, synchronization and migration of trajectories under the staleness bound."""

    policy: Literal["staleflow", "strict_queue", "strict", "one_step", "sync"] = "staleflow"
    """staleflow; or a baseline in the same system: strict_queue (one central queue with a concurrency cap),
    strict (groups dispatched once), both by batches ahead; one_step (a barrier, one step ahead); sync."""
    interval_ms: float = Field(default=50.0, gt=0)
    """Milliseconds between coordination cycles."""
    cost_model: str | None = None
    """File written by `staleflow profile`. Null: start values, refined during the run."""
    refine_costs: bool = True
    """Fit the cost model anew to what instances report; false: keep the file's, or the start values."""
    routing: Routing = Routing()
    synchronization: Synchronization = Synchronization()
    migration: Migration = Migration()
    stragglers: Stragglers = Stragglers()
