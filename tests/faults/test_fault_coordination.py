"""F35, F36 and F41 on whole clusters: real rollout instances on a virtual clock, one thing made hard.

While they run, `cluster_watch` checks every command and report against books of its own: that no trajectory
is on two instances, that no Route exceeds the KV cache, that no move comes too soon or for nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from cluster_settings import FAST, ClusterSettings, InstanceSettings
from random_cluster import RandomCluster

from staleflow.coordination.actions import Interrupt
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.migration import MigrationSettings
from staleflow.coordination.policies import POLICIES, PolicySettings
from staleflow.data.trajectory import Trajectory
from staleflow.rollout.scripted_lengths import Lengths
from staleflow.telemetry.events import CommandSent, Handlers, ReportReceived

LONG = 50_000
"""Tokens of a prompt."""


class Observed(RandomCluster):
    """Keeps the moves, and what the instances reported."""

    def __init__(self, settings: ClusterSettings, lengths: Lengths | None = None) -> None:
        super().__init__(settings, lengths=lengths)
        self.moves: list[str] = []
        self.versions: list[tuple[float, str, int]] = []
        self.kv_tokens: list[int] = []

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {**super().handlers(), CommandSent: self._sent, ReportReceived: self._reported}

    def _sent(self, event: CommandSent) -> None:
        command = event.command
        if isinstance(command, Interrupt) and command.reason.startswith("migration"):
            self.moves.append(command.trajectory_id)

    def _reported(self, event: ReportReceived) -> None:
        self.versions.append((self.clock.time, event.report.instance, event.report.version))
        self.kv_tokens.append(event.report.kv_tokens)


# ---------------------------------------------------------------------- F35: moves that do not pay


def two_long_ones_beside_an_idle_instance(prefill: float) -> Observed:
    """One group of four, two on each instance; the two on i1 end soon, those on i0 have 300 tokens to go.

    With 50,000 tokens each in the cache a step takes 102 ms on i0, and 52 ms for one alone: a move raises
    the throughput from 20 to 38 tokens/s. It costs a prefill of 50,000 tokens.
    """
    costs = CostModel(k1=1e-6, k2=0.0, k3=0.0, k4=0.002, prefill=prefill, pull=0.0)

    def scripted(trajectory: Trajectory) -> int:
        return 300 if trajectory.member in (0, 2) else 3

    return Observed(
        ClusterSettings(
            seed=1,
            bound=0,
            batch_size=1,
            group_size=4,
            steps=1,
            instances=(InstanceSettings(kv_capacity=4 * LONG, max_running=8, costs=costs),) * 2,
            known_costs=costs,
            refine_costs=False,
            prompt_lengths=(LONG,),
            max_new_tokens=300,
            strategies=PolicySettings(moves=MigrationSettings(rest_s=0.5, psi_throughput=1.5)),
            stall_after_s=1000.0,
        ),
        scripted,
    )


def test_a_trajectory_of_50000_tokens_stays_where_its_prefill_would_cost_more_than_the_move_saves() -> None:
    """F35: 50 s of prefill stop more than 300 tokens can gain."""
    cluster = two_long_ones_beside_an_idle_instance(prefill=1e-3)
    assert cluster.run() == "completed"
    assert cluster.moves == []


def test_the_same_trajectory_moves_once_where_its_prefill_is_cheap_and_never_back() -> None:
    """F35: half a second of prefill pays; one against one there is nothing more to gain."""
    cluster = two_long_ones_beside_an_idle_instance(prefill=1e-5)
    assert cluster.run() == "completed"
    assert len(cluster.moves) == 1


def test_in_a_crowd_that_may_move_at_any_time_no_trajectory_moves_often() -> None:
    """F35: no rest, no gap too small and free prefill, the most that may be set; seven seeds.

    That no move comes without a token gained since the last one is checked at each.
    """
    costs = CostModel(k1=1e-3, k2=0.005, k3=0.0, k4=0.002, prefill=0.0, pull=0.02)
    moves: Counter[str] = Counter()
    trajectories = 0
    for seed in range(7):
        cluster = Observed(
            ClusterSettings(
                seed=seed,
                group_size=8,
                steps=3,
                instances=tuple(
                    InstanceSettings(kv_capacity=capacity, max_running=16, costs=costs)
                    for capacity in (100, 140, 180)
                ),
                known_costs=costs,
                median_response=16.0,
                spread=1.5,
                max_new_tokens=48,
                strategies=PolicySettings(
                    mu=0.0, moves=MigrationSettings(rest_s=0.0, psi_throughput=1.0, phi_wait=0)
                ),
            )
        )
        assert cluster.run() == "completed"
        moves.update(f"{seed}/{name}" for name in cluster.moves)
        trajectories += 3 * 2 * 8
    assert moves, "nothing moved, so nothing was tested"
    assert moves.total() < trajectories, "less than a move for each trajectory"


# ---------------------------------------------------------------------- F36: refused pulls


def with_an_outage(policy: str) -> ClusterSettings:
    """Ten steps, of which i1 can pull nothing for the better part."""
    return ClusterSettings(
        seed=3,
        policy=policy,
        bound=1,
        batch_size=2,
        group_size=3,
        steps=10,
        instances=(InstanceSettings(kv_capacity=120, max_running=4, costs=FAST),) * 3,
        outage=(1, 0.2, 2.5),
        delay=0.02,
        train_s=0.4,
        stall_after_s=60.0,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_an_instance_that_cannot_pull_keeps_its_version_and_the_others_go_on(policy: str) -> None:
    """F36: the versions that the instances report, in the outage and after it."""
    cluster = Observed(with_an_outage(policy))
    assert cluster.run() == "completed"
    refused = [(at, version) for at, name, version in cluster.versions if name == "i1"]
    during = {version for at, version in refused if 0.3 < at < 2.5}
    assert len(during) <= 1, "it changed its version while it could not pull"
    others = {v for at, name, v in cluster.versions if name != "i1" and 0.3 < at < 2.5}
    assert len(others) >= 3, "the others take new versions meanwhile"
    assert max(version for _, version in refused) > max(during, default=0), "it pulls again afterwards"
    assert cluster.watch.rejected["pull"] > 0
    assert cluster.given_up == set(), "a refused pull is no failure of the trajectories that were to follow"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_other_pull_refused_everywhere_ends_all_the_same(policy: str) -> None:
    """F36: retried until they come through, under barriers too."""
    cluster = Observed(replace(with_an_outage(policy), outage=None, refusals=0.5))
    assert cluster.run() == "completed"
    assert cluster.watch.rejected["pull"] > 0


# ---------------------------------------------------------------------- F41: too many in flight

FULL = ClusterSettings(
    seed=1,
    bound=1,
    batch_size=4,
    group_size=8,
    steps=4,
    instances=(InstanceSettings(kv_capacity=100, max_running=64, costs=FAST),) * 2,
    median_response=8.0,
    spread=0.0,
    max_new_tokens=16,
    progress_interval_s=0.05,
)
"""64 trajectories at once of 4 + 8 tokens each; a cache holds eight of them to their end."""


def test_routing_within_the_cache_preempts_nothing_where_lengths_are_as_expected() -> None:
    """F41: eight at a time, 96 of 100 tokens at their end, counted with a share of 0.3 left free."""
    cluster = Observed(replace(FULL, strategies=PolicySettings(kv_headroom=0.3)))
    assert cluster.run() == "completed"
    assert sum(cluster.watch.preemptions.values()) == 0
    assert max(cluster.kv_tokens) <= 100


def test_preemptions_of_a_dispatch_that_knows_no_cache_are_counted_in_the_reports() -> None:
    """F41: the engines' own count, and what `Control` is told."""
    cluster = Observed(replace(FULL, policy="strict", spread=0.5))
    assert cluster.run() == "completed"
    counted = {name: node.engine.load().preemptions for name, node in cluster.nodes.items()}
    assert sum(counted.values()) > 10
    assert {name: n for (name, _), n in cluster.watch.preemptions.items()} == counted
    assert max(cluster.kv_tokens) <= 100
