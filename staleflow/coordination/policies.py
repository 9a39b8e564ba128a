"""Whole policies: staleflow and the baselines it is compared with, in the same system.

    ============  ====================================  ==================  ==================  ===========
    policy        groups that may start                 routing             synchronization     migration
    ============  ====================================  ==================  ==================  ===========
    staleflow     what the buffer can place             waterfall           selective           cost-aware
    strict_queue  (v + η + 1) batches, those consumed   central queue with  all, at once        never
                  and reserved together                 a cap
    strict        the same                              static, by group    all, at once        never
    one_step      one batch, when the last is consumed  static, by group    barrier             never
    sync          the same, with η = 0                  static, by group    barrier             never
    ============  ====================================  ==================  ==================  ===========

with v the newest version pushed. Others call `strict` and `strict_queue` a limit of off-policy steps (AReaL's
rule); `one_step` is one-step off-policy with a global barrier; `sync` alternates between generating a batch
and training on it. All go through the same protocol, so all keep the bound; no baseline is weakened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from staleflow.coordination.coordinator import AdmissionRule, Coordinator
from staleflow.coordination.migration import (
    CostAwareMigration,
    MigrationSettings,
    MigrationStrategy,
    NaiveMigration,
)
from staleflow.coordination.routing import (
    KV_HEADROOM,
    CentralQueueRouting,
    NaiveRouting,
    RoutingStrategy,
    StaticRouting,
    WaterfallRouting,
)
from staleflow.coordination.snapshot import Snapshot
from staleflow.coordination.synchronization import (
    BarrierSynchronization,
    NaiveSynchronization,
    SelectiveSynchronization,
    SynchronizationStrategy,
)

Strategy = TypeVar("Strategy")
POLICIES = ("staleflow", "strict_queue", "strict", "one_step", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The tunable part of the policies. A strategy is a name, one of the caller's own, or None: the policy's
    default.
    """

    routing: str | RoutingStrategy | None = None
    synchronization: str | SynchronizationStrategy | None = None
    migration: str | MigrationStrategy | None = None
    mu: float = 0.3
    kv_headroom: float = KV_HEADROOM
    max_per_instance: int = 256
    """The cap of strict_queue."""
    moves: MigrationSettings = field(default_factory=MigrationSettings)
    recompute: bool = True
    """A pull rebuilds the KV of running trajectories."""


def effective_bound(policy: str, bound: int) -> int:
    """The bound that a policy keeps: 0 for `sync`, at most 1 for `one_step`."""
    return {"sync": 0, "one_step": min(bound, 1)}.get(policy, bound)


def build_coordinator(policy: str, settings: PolicySettings) -> Coordinator:
    """The coordinator of a policy. KeyError for names that the config would refuse."""
    admission, routing, synchronization, migration = _PARTS[policy]
    return Coordinator(
        admission=admission,
        routing=_chosen(settings.routing or routing, _ROUTING, settings),
        synchronization=_chosen(settings.synchronization or synchronization, _SYNCHRONIZATION, settings),
        migration=_chosen(settings.migration or migration, _MIGRATION, settings),
    )


def _chosen(
    strategy: str | Strategy, named: dict[str, Callable[[PolicySettings], Strategy]], settings: PolicySettings
) -> Strategy:
    return named[strategy](settings) if isinstance(strategy, str) else strategy


def what_fits(snapshot: Snapshot) -> int | None:
    """No limit beyond the protocol's."""
    return None


def batches_ahead(snapshot: Snapshot) -> int:
    """AReaL's rule: consumed + reserved <= (v + η + 1) * batch_size."""
    counts = snapshot.counts
    allowed = (snapshot.newest_version + counts.bound + 1 - snapshot.next_buffer) * counts.batch_size
    return max(0, allowed - counts.total)


def one_batch(snapshot: Snapshot) -> int:
    """One batch at a time; released groups are replaced."""
    return max(0, snapshot.counts.batch_size - snapshot.counts.total)


_ROUTING: dict[str, Callable[[PolicySettings], RoutingStrategy]] = {
    "waterfall": lambda s: WaterfallRouting(mu=s.mu, kv_headroom=s.kv_headroom),
    "naive": lambda s: NaiveRouting(kv_headroom=s.kv_headroom),
    "central_queue": lambda s: CentralQueueRouting(max_per_instance=s.max_per_instance),
    "static": lambda s: StaticRouting(),
}
_SYNCHRONIZATION: dict[str, Callable[[PolicySettings], SynchronizationStrategy]] = {
    "selective": lambda s: SelectiveSynchronization(
        recompute=s.recompute, mu=s.mu, kv_headroom=s.kv_headroom
    ),
    "naive": lambda s: NaiveSynchronization(),
    "barrier": lambda s: BarrierSynchronization(),
}
_MIGRATION: dict[str, Callable[[PolicySettings], MigrationStrategy]] = {
    "cost_aware": lambda s: CostAwareMigration(s.moves),
    "naive": lambda s: NaiveMigration(),
}
_PARTS: dict[str, tuple[AdmissionRule, str, str, str]] = {
    "staleflow": (what_fits, "waterfall", "selective", "cost_aware"),
    "strict_queue": (batches_ahead, "central_queue", "naive", "naive"),
    "strict": (batches_ahead, "static", "naive", "naive"),
    "one_step": (one_batch, "static", "barrier", "naive"),
    "sync": (one_batch, "static", "barrier", "naive"),
}
