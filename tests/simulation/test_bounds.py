"""Bounds by hand, and no simulated policy above them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.policies import POLICIES, effective_bound
from staleflow.runtime.simulate import simulate_policy
from staleflow.simulation.bounds import draw_batches, find_bounds
from staleflow.simulation.response_lengths import fixed, lognormal
from staleflow.simulation.settings import ClusterSettings, TrainerCosts

CLUSTER = ClusterSettings(
    instances=3,
    kv_capacity=100,
    max_running=8,
    costs=CostModel(k1=0.0, k2=1.0, k3=0.25, k4=0.5, prefill=0.125, pull=0.0),
    trainer=TrainerCosts(fixed_s=3.0, token_s=0.5, push_s=1.0),
    group_size=2,
    lengths=fixed(10),
    prompt_length=4,
    max_new_tokens=16,
)


def test_bounds_by_hand() -> None:
    """10 tokens each, 4 + 5 held on average: 8 run, in 2.5 s a step; 5 groups of 2 a batch."""
    bounds = find_bounds(CLUSTER, bound=1, batch_size=5)
    assert bounds.best_running == 8
    assert bounds.rollout == pytest.approx(3 * 10 / (10 * 2.5 / 8 + 0.5))
    update, push = 3 + 0.5 * 140, 1
    assert bounds.trainer == pytest.approx(100 / update)
    alone = 0.5 + 10 * 1.5
    assert bounds.latency == pytest.approx(100 * 2 / (alone + update + push))
    assert (bounds.binding, bounds.least) == ("trainer", bounds.trainer)
    assert bounds.step_tokens == 100
    assert bounds.seconds() == bounds.seconds("trainer") == pytest.approx(update)
    assert bounds.seconds("latency") == pytest.approx((alone + update + push) / 2)


def test_a_push_that_takes_longer_than_an_update_binds_the_trainer() -> None:
    slow = dataclasses.replace(CLUSTER, trainer=TrainerCosts(fixed_s=3.0, token_s=0.5, push_s=200.0))
    bounds = find_bounds(slow, bound=3, batch_size=5)
    assert bounds.seconds("trainer") == pytest.approx(200)
    result = simulate_policy("staleflow", slow, bound=3, batch_size=5, steps=8)
    periods = [b.ended - a.ended for a, b in itertools.pairwise(result.steps)]
    assert min(periods) >= 73
    assert result.steps[-1].ended - result.steps[2].ended == pytest.approx(5 * 200, rel=1e-6)


def test_without_staleness_nothing_is_generated_during_an_update() -> None:
    """100 tokens at the rollout's peak, then 3 + 0.5 * 140 seconds of update and 1 of push."""
    peak = find_bounds(CLUSTER, bound=1, batch_size=5).rollout
    bounds = find_bounds(CLUSTER, bound=0, batch_size=5)
    assert bounds.seconds("rollout") == pytest.approx(100 / peak + 74)
    assert bounds.binding == "latency"  # 15.5 s alone, while 3 * 8 trajectories at once take less
    assert bounds.seconds() == pytest.approx(0.5 + 10 * 1.5 + 74)


def test_the_latency_binds_where_responses_differ_much() -> None:
    """One response of 2,000 tokens among ten, at 1.5 s a token alone: 3,000.5 s and an update, over 3
    periods."""
    lengths = {"m0": 2000}
    cluster = dataclasses.replace(
        CLUSTER,
        kv_capacity=10_000,
        max_new_tokens=2000,
        trainer=TrainerCosts(fixed_s=3.0, token_s=0.01, push_s=1.0),
        lengths=lambda prompt, members: [
            lengths.get(m.rpartition("-")[2] if prompt.endswith(("0", "5")) else "", 10) for m in members
        ],
    )
    bounds = find_bounds(cluster, bound=2, batch_size=5)
    assert bounds.step_tokens == 2000 + 9 * 10
    update = 3 + 0.01 * (2090 + 40) + 1
    assert bounds.binding == "latency"
    assert bounds.seconds() == pytest.approx((0.5 + 2000 * 1.5 + update) / 3)


def test_of_redundant_members_the_shortest_count() -> None:
    cluster = dataclasses.replace(
        CLUSTER, surplus=1, lengths=lambda prompt, members: [16, 10, 10][: len(members)]
    )
    plain = find_bounds(CLUSTER, bound=1, batch_size=5)
    assert find_bounds(cluster, bound=1, batch_size=5) == plain


def test_lengths_drawn_once_serve_for_every_cluster_of_them() -> None:
    drawn = draw_batches(CLUSTER, batch_size=5, batches=2)
    assert find_bounds(CLUSTER, bound=1, batch_size=5, drawn=drawn) == find_bounds(
        CLUSTER, bound=1, batch_size=5, batches=2
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_faster_than_the_bounds(policy: str) -> None:
    cluster = dataclasses.replace(
        CLUSTER,
        kv_capacity=1500,
        max_new_tokens=200,
        trainer=TrainerCosts(fixed_s=3.0, token_s=0.002, push_s=1.0),
        lengths=lognormal(median=60, sigma=0.6, most=200, seed=0),
    )
    bound = effective_bound(policy, 2)
    result = simulate_policy(policy, cluster, bound=2, batch_size=8, steps=8)
    bounds = find_bounds(cluster, bound=bound, batch_size=8)
    assert 0 < result.throughput(skip=1, leave=1) <= 1.05 * bounds.least
