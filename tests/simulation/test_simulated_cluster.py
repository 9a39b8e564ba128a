"""Whole simulated runs: tokens in balance, audit, the same ledger from the same seed, no hang."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from staleflow.audit import audit_ledger
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting, RoutingStrategy, WaterfallRouting
from staleflow.coordination.speculative import SpeculativeState
from staleflow.coordination.stragglers import StragglerAction, StragglerRule
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.errors import RunFailed, UserError
from staleflow.protocol.records import LastBatch
from staleflow.runtime.assembly.simulated import StopAfter
from staleflow.runtime.backend import Message
from staleflow.runtime.backends.simulated import SimulatedBackend
from staleflow.runtime.simulate import simulate
from staleflow.simulation.response_lengths import fixed, lognormal
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.settings import ClusterSettings, Outage, Slowdown, TrainerCosts
from staleflow.training.filtering import is_uninformative

SMALL = ClusterSettings(
    instances=3,
    kv_capacity=900,
    max_running=6,
    costs=CostModel(k1=1e-5, k2=0.02, k3=0.006, k4=0.005, prefill=1e-4, pull=0.3),
    trainer=TrainerCosts(fixed_s=0.5, token_s=2e-4, push_s=0.1),
    group_size=4,
    lengths=lognormal(median=60, sigma=0.8, most=200, correlation=0.5, seed=0),
    prompt_length=20,
    max_new_tokens=200,
    progress_interval_s=1.0,
)


class Restless:
    """A migration that interrupts at random: hard on everything that counts tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def migrate(self, state: SpeculativeState) -> None:
        for name in list(state.instances):
            for resident in state.snapshot.resident(name):
                if not resident.leaving and self._rng.random() < 0.02:
                    state.interrupt(resident.trajectory_id, resident.length, name, "restless")


def naive() -> Coordinator:
    return Coordinator(
        routing=NaiveRouting(), synchronization=NaiveSynchronization(), migration=NaiveMigration()
    )


def restless(seed: int, routing: RoutingStrategy | None = None) -> Coordinator:
    return Coordinator(
        routing=routing or NaiveRouting(), synchronization=NaiveSynchronization(), migration=Restless(seed)
    )


def check_balance(result: SimulationResult) -> None:
    fates = {fate: tokens for fate, tokens in result.tokens.items() if fate != "generated"}
    assert result.tokens["generated"] == sum(fates.values()), result.tokens
    assert min(fates.values()) >= 0


def random_cluster(seed: int) -> ClusterSettings:
    rng = random.Random(seed)
    trouble = seed % 2
    outages = tuple(
        Outage(at=rng.uniform(0, 60), instance=n, down_s=rng.uniform(0, 10))
        for n in range(2)
        for _ in range(3 * trouble)
    )
    return dataclasses.replace(
        SMALL,
        kv_capacity=rng.choice((230, 600, 5000)),
        max_running=rng.choice((1, 4, 30)),
        surplus=rng.choice((0, 2)),
        on_pull=rng.choice(("recompute", "keep_kv")),
        interval_s=rng.choice((0.05, 0.5)),
        command_s=rng.choice((0.0, 0.3)),
        report_s=rng.choice((0.0, 0.4)),
        reward_s=rng.choice((0.0, 0.2)),
        reward_workers=rng.choice((None, 1, 3)),
        reward=coin,
        outages=outages,
        slowdowns=(Slowdown(at=5.0, instance=2, factor=4.0), Slowdown(at=20.0, instance=2, factor=1.0)),
        lengths=lognormal(
            median=60, sigma=0.8, most=200, correlation=0.5, truncated=0.1 * trouble, seed=seed
        ),
    )


def coin(identity: str) -> float:
    """Reward 0 or 1 by the id alone."""
    return float(random.Random(identity).random() < 0.5)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_random_clusters_keep_tokens_in_balance_and_pass_the_audit(bound: int, tmp_path: Path) -> None:
    seen, fates = 0, set()
    for seed in range(12):
        ledger = tmp_path / f"{seed}.jsonl"
        result = simulate(
            restless(seed),
            random_cluster(seed),
            bound=bound,
            batch_size=5,
            steps=6,
            group_filter=is_uninformative if seed % 3 == 0 else None,
            ledger=ledger,
        )
        assert result.reason == "completed"
        report = audit_ledger(ledger)
        assert report.violations == ()
        assert report.max_staleness == result.staleness_max <= bound
        assert sum(result.staleness.values()) == sum(row.trajectories for row in result.steps) == 6 * 5 * 4
        check_balance(result)
        seen = max(seen, result.staleness_max)
        fates |= {fate for fate, tokens in result.tokens.items() if tokens}
    assert seen >= min(bound, 2), "the bound is used"
    assert fates >= {"trained", "filtered", "aborted", "lost"}


@pytest.mark.parametrize("action", ["wait", "retry", "truncate"])
def test_spare_groups_and_stragglers_keep_tokens_in_balance(action: StragglerAction, tmp_path: Path) -> None:
    fates, acted = set(), 0
    for seed in range(10):
        ledger = tmp_path / f"{action}-{seed}.jsonl"
        result = simulate(
            restless(seed, WaterfallRouting()),
            dataclasses.replace(random_cluster(seed), kv_capacity=600, max_running=30),
            bound=1,
            batch_size=4,
            steps=6,
            spare_groups=3,
            stragglers=StragglerRule(action=action, at_most=3),
            ledger=ledger,
        )
        assert result.reason == "completed"
        assert audit_ledger(ledger).violations == ()
        check_balance(result)
        fates |= {fate for fate, tokens in result.tokens.items() if tokens}
        acted += result.resampled + result.truncated
    assert fates >= {"trained", "expired"}
    assert (acted > 0) == (action != "wait")


def test_a_run_cut_by_time_still_balances(tmp_path: Path) -> None:
    for seed in range(10):
        result = simulate(
            restless(seed), random_cluster(seed), bound=2, batch_size=5, steps=99, max_seconds=7.3 + seed
        )
        assert result.reason == "time"
        assert result.seconds == 7.3 + seed
        assert result.tokens["in_flight"] > 0
        check_balance(result)


@pytest.mark.parametrize(("at_once", "reason"), [(True, "time"), (False, "interrupted")])
def test_a_run_may_end_after_so_many_steps(at_once: bool, reason: str) -> None:
    """Halted at the end of the second step, or with the step done that is in training then."""
    whole = simulate(restless(1), random_cluster(1), bound=2, batch_size=4, steps=8)
    stop = StopAfter(2, at_once=at_once)
    cut = simulate(restless(1), random_cluster(1), bound=2, batch_size=4, steps=8, listeners=[stop])
    assert cut.reason == reason
    assert cut.steps[:2] == whole.steps[:2]
    assert len(cut.steps) in ((2,) if at_once else (2, 3))
    if at_once:
        assert cut.seconds == whole.steps[1].ended
    check_balance(cut)


def test_the_same_seed_gives_the_same_ledger_byte_for_byte(tmp_path: Path) -> None:
    def ledger(name: str, seed: int) -> bytes:
        path = tmp_path / name
        simulate(restless(seed), random_cluster(seed), bound=2, batch_size=5, steps=5, ledger=path)
        return path.read_bytes()

    assert ledger("a", 3) == ledger("b", 3)
    assert ledger("c", 5) != ledger("d", 7)


@pytest.mark.parametrize(("last_batch", "groups"), [("train", 7), ("drop", 4), ("pad", 8)])
def test_a_source_of_seven_prompts_ends_by_the_stated_policy(
    last_batch: LastBatch, groups: int, tmp_path: Path
) -> None:
    settings = dataclasses.replace(SMALL, prompts=7)
    ledger = tmp_path / "ledger.jsonl"
    result = simulate(naive(), settings, bound=1, batch_size=4, steps=9, last_batch=last_batch, ledger=ledger)
    assert result.reason == "exhausted"
    assert sum(row.trajectories for row in result.steps) == 4 * groups
    assert audit_ledger(ledger).violations == ()
    check_balance(result)


def test_a_synchronous_run_by_hand() -> None:
    """η = 0, one group of two, 10 tokens each: every figure follows from the cost model."""
    settings = ClusterSettings(
        instances=1,
        kv_capacity=1000,
        max_running=8,
        costs=CostModel(k1=0.0, k2=1.0, k3=0.25, k4=0.5, prefill=0.125, pull=2.0),
        trainer=TrainerCosts(fixed_s=3.0, token_s=0.5, push_s=1.0),
        group_size=2,
        lengths=fixed(10),
        prompt_length=4,
        max_new_tokens=16,
        interval_s=1e-6,
        reward_s=7.0,
    )
    result = simulate(naive(), settings, bound=0, batch_size=1, steps=3)
    generate = 8 * 0.125 + 10 * 1.5
    train = 3.0 + 0.5 * 28
    push_and_pull = 1.0 + 2.0
    expected = [generate + 7, *[push_and_pull + generate + 7] * 2]
    assert [row.waited for row in result.steps] == pytest.approx(expected, abs=1e-4)
    assert [row.ended - row.began for row in result.steps] == pytest.approx([train] * 3)
    assert result.seconds == pytest.approx(sum(expected) + 3 * train + 1.0, abs=1e-3), "with the last push"
    assert result.tokens == {**dict.fromkeys(result.tokens, 0), "generated": 60, "trained": 60}
    assert result.staleness == {0: 6}
    assert result.commands == {"route": 6, "interrupt": 0, "abort": 0, "pull": 2}
    row = result.instances[0]
    assert (row.pulls, row.generated, row.running_mean) == (2, 60, 2.0)
    assert row.busy == pytest.approx(3 * generate)
    assert row.pulling == pytest.approx(4.0)
    assert result.trainer_idle_share == pytest.approx((sum(expected) + 1.0) / result.seconds)


def test_one_reward_worker_scores_one_after_the_other() -> None:
    slow = dataclasses.replace(SMALL, reward_s=1.0, reward_workers=1)
    result = simulate(naive(), slow, bound=0, batch_size=5, steps=2)
    assert all(row.waited > 20 * 1.0 for row in result.steps)


def test_a_dead_instance_costs_only_what_it_had_not_reported() -> None:
    settings = dataclasses.replace(
        SMALL, progress_interval_s=0.5, outages=(Outage(at=3.0, instance=0, down_s=None),)
    )
    result = simulate(naive(), settings, bound=1, batch_size=5, steps=5)
    assert result.reason == "completed"
    assert 0 < result.tokens["lost"] <= 6 * 0.5 / 0.025
    assert result.instances[0].up == pytest.approx(3.0)
    check_balance(result)


def test_a_cluster_that_comes_to_a_stand_says_so() -> None:
    settings = dataclasses.replace(
        SMALL, outages=tuple(Outage(at=1.0, instance=n, down_s=None) for n in range(3))
    )
    with pytest.raises(RunFailed, match="stuck after"):
        simulate(naive(), settings, bound=1, batch_size=5, steps=5)


def test_a_coordinator_that_only_wants_to_be_woken_again_is_no_hang() -> None:
    class Waiting:
        def migrate(self, state: SpeculativeState) -> float:
            return state.snapshot.now + 1.0

    settings = dataclasses.replace(
        SMALL, outages=tuple(Outage(at=1.0, instance=n, down_s=None) for n in range(3))
    )
    coordinator = Coordinator(
        routing=NaiveRouting(), synchronization=NaiveSynchronization(), migration=Waiting()
    )
    with pytest.raises(RunFailed, match="stuck after"):
        simulate(coordinator, settings, bound=1, batch_size=5, steps=5)


def test_memory_follows_the_living_trajectories_not_the_length_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most (η + 1) batches and the one in training live; scheduled events do not pile up either."""
    most = {"trajectories": 0, "events": 0}
    poll = SimulatedBackend.poll

    def watched(backend: SimulatedBackend, until: float) -> Sequence[Message]:
        most["trajectories"] = max(most["trajectories"], len(backend.store))
        most["events"] = max(most["events"], len(backend.clock))
        return poll(backend, until)

    monkeypatch.setattr(SimulatedBackend, "poll", watched)
    simulate(naive(), dataclasses.replace(SMALL, interval_s=0.5), bound=1, batch_size=5, steps=60)
    assert most["trajectories"] <= 3 * 5 * 4
    assert most["events"] <= 100


def test_a_kv_cache_too_small_for_one_response_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"219 tokens .* 20 \(prompt\) \+ 200 \(max_new_tokens\) = 220"):
        dataclasses.replace(SMALL, kv_capacity=219)
