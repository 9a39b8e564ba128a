"""The verdict, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import STEPS, run_of

from staleflow.reporting.bottleneck import Resources, bottleneck, resources
from staleflow.reporting.utilization import TimeShares

SHARES = TimeShares(
    trainer_waiting=0.0,
    waiting_for={},
    updating=0.5,
    pushing=0.01,
    idle=0.0,
    idle_while_training=0.0,
    decoding=0.8,
    pulling=0.02,
    commands=0.01,
    coordination=0.005,
    verifying=0.9,
)
RESOURCES = Resources(
    policy="staleflow",
    bound=1,
    instances=4,
    instance_threads=2,
    trainer_threads=4,
    reward_workers=1,
    one_machine=False,
    cores=None,
)


def shares(waiting: float, idle: float, during: float | None = None, **causes: float) -> TimeShares:
    return replace(SHARES, trainer_waiting=waiting, idle=idle, idle_while_training=during, waiting_for=causes)


@pytest.mark.parametrize(
    ("waiting", "idle", "during", "kind"),
    [
        (0.10, 0.05, 0.05, "balanced"),
        (0.14, 0.60, 0.14, "balanced"),
        (0.62, 0.03, 0.02, "rollout-bound"),
        (0.30, 0.50, 0.10, "rollout-bound"),
        (0.02, 0.40, 0.37, "trainer-bound"),
        (0.16, 0.40, 0.35, "trainer-bound"),
        (0.40, 0.45, 0.35, "taking turns"),
        (0.50, 0.35, 0.24, "rollout-bound"),
    ],
)
def test_the_side_that_is_waited_for_is_the_slow_one(
    waiting: float, idle: float, during: float, kind: str
) -> None:
    assert bottleneck(shares(waiting, idle, during), RESOURCES).kind == kind


@pytest.mark.parametrize(
    ("cause", "kind", "advice"),
    [
        ("rollout", "rollout-bound", "Move resources from training to rollout"),
        ("longest", "latency-bound", "More instances will not help"),
        ("reward", "reward-bound", "Raise reward.workers from 1 to about 2"),
        ("pull", "pull-bound", "Pull less often"),
        ("routing", "coordination-bound", "Lower coordination.interval_ms"),
        ("environment", "environment-bound", "Make the environment faster"),
    ],
)
def test_what_the_trainer_waited_for_longest_decides(cause: str, kind: str, advice: str) -> None:
    causes = {"rollout": 0.1, "longest": 0.1, "reward": 0.1, cause: 0.3}
    found = bottleneck(shares(0.5, 0.1, 0.0, **causes), RESOURCES)
    assert found.kind == kind
    assert "the trainer waited 50% of the time, 30% while" in found.figures
    assert found.advice.startswith(advice)


def test_pulls_that_cost_more_than_decoding_are_what_rollout_is_slow_with() -> None:
    slow = replace(shares(0.5, 0.1, 0.0, rollout=0.5), pulling=0.5, decoding=0.3)
    assert bottleneck(slow, RESOURCES).kind == "pull-bound"


def test_the_split_is_what_each_side_was_at_work_with() -> None:
    """8 threads at work 95 % of the time and 4 at work 46 %: 7.6 to 1.84, where it was 8 to 4."""
    found = bottleneck(shares(0.54, 0.05, 0.0, rollout=0.5), RESOURCES)
    assert found.split == pytest.approx((7.6, 1.84))
    assert found.split_now == (8.0, 4.0)
    assert "from 2 : 1 to about 4.1 : 1" in found.advice
    assert "share" not in found.advice


def test_on_one_machine_the_split_is_called_a_direction() -> None:
    shared = replace(RESOURCES, one_machine=True, cores=2)
    advice = bottleneck(shares(0.54, 0.05, 0.0, rollout=0.5), shared).advice
    assert "Their 12 threads share this machine's 2 cores" in advice
    assert "take the ratio as a direction" in advice


def test_without_the_sizes_of_both_sides_there_is_no_ratio() -> None:
    found = bottleneck(shares(0.02, 0.4, 0.4), replace(RESOURCES, instances=None))
    assert (found.kind, found.split, found.advice) == (
        "trainer-bound",
        None,
        "Move resources from rollout to training",
    )


def test_work_that_is_spread_unevenly_is_told() -> None:
    found = bottleneck(shares(0.5, 0.3, 0.02, rollout=0.5), RESOURCES)
    assert "28% while the trainer waited, so the work was spread unevenly" in found.figures


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"policy": "sync", "bound": 0}, "Policy sync alternates them"),
        ({"bound": 0}, "staleness.bound: 0 alternates them"),
        ({"bound": 2}, "A larger staleness.bound"),
    ],
)
def test_taking_turns_names_what_makes_the_sides_do_so(given: dict[str, object], advice: str) -> None:
    found = bottleneck(shares(0.5, 0.45, 0.4), replace(RESOURCES, **given))  # type: ignore[arg-type]
    assert found.kind == "taking turns"
    assert found.advice.startswith(advice)


def test_without_samples_of_both_sides_nothing_is_said() -> None:
    for missing in (replace(SHARES, idle=None), replace(SHARES, trainer_waiting=None)):
        assert bottleneck(missing, RESOURCES).kind == "unknown"


def test_a_run_that_did_not_record_causes_still_gets_a_side() -> None:
    assert bottleneck(shares(0.62, 0.03, None), RESOURCES).kind == "rollout-bound"
    assert bottleneck(shares(0.02, 0.40, None), RESOURCES).kind == "trainer-bound"


def test_the_resources_are_read_from_config_ledger_and_summary(tmp_path: Path) -> None:
    config = (
        "staleness: {bound: 3}\ncoordination: {policy: sync}\nrollout: {instances: 2, threads: 1}\n"
        "training: {threads: 1}\nreward: {workers: 3}\ncluster: {address: null}\n"
    )
    run = run_of(
        tmp_path,
        *STEPS,
        {"kind": "summary", "run/cpu_cores": 2},
        ledger=({"kind": "start", "bound": 0},),
        config=config,
    )
    assert resources(run) == Resources(
        policy="sync",
        bound=0,
        instances=2,
        instance_threads=1,
        trainer_threads=1,
        reward_workers=3,
        one_machine=True,
        cores=2,
    )
    empty = resources(run_of(tmp_path / "empty", *STEPS))
    assert (empty.instances, empty.one_machine, empty.cores) == (None, False, None)
