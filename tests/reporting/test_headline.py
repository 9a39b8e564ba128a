"""The numbers of a report, worked out by hand from small runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import STEPS, run_of

from staleflow.reporting.headline import accuracy_name, headline, mean_timings


def test_headline_by_hand(tmp_path: Path) -> None:
    ledger = tuple(
        {
            "kind": "trained",
            "step": s,
            "version": s,
            "trajectories": [
                {"id": f"{s}{lag}", "min": s - lag, "max": s, "tokens": 20, "hash": ""} for lag in lags
            ],
        }
        for s, lags in ((0, (0, 0)), (1, (0, 1)))
    )
    evals = tuple(
        {"kind": "eval", "eval/weight_version": v, "eval/heldout/avg@1": a, "eval/heldout_greedy/avg@1": 0.9}
        for v, a in ((0, 0.5), (2, 0.75))
    )
    samples = tuple(
        {"kind": "instances", "run/seconds": float(t), "instance/0/running": a, "instance/1/running": b}
        for t, (a, b) in enumerate(((0, 4), (3, 4), (0, 4), (3, 0)))
    )
    config = "run: {steps: 2}\nstaleness: {bound: 1}\ncoordination: {policy: staleflow}\n"
    n = headline(run_of(tmp_path, *samples, *STEPS, *evals, ledger=ledger, config=config))
    assert (n.policy, n.bound, n.steps, n.planned, n.seconds) == ("staleflow", 1, 2, 2, 20.0)
    assert n.tokens_per_s == 80 / 20
    assert (n.staleness_mean, n.staleness_max) == (0.25, 1)
    assert (n.first_accuracy, n.last_accuracy, n.first_version, n.last_version) == (0.5, 0.75, 0, 2)
    assert n.generated_per_s == 100 / 20
    assert n.steps_per_s == 2 / 20
    assert (n.shares.trainer_waiting, n.shares.idle) == (8 / 20, 3 / 8)
    assert n.reason == "running or killed"


def test_what_was_not_measured_is_none(tmp_path: Path) -> None:
    n = headline(run_of(tmp_path, {"kind": "train", "train/step": 0}))
    assert (n.seconds, n.tokens_per_s, n.staleness_mean, n.staleness_max, n.last_accuracy, n.tokens) == (
        None,
    ) * 6
    assert (n.generated_per_s, n.steps_per_s, n.counts, n.lengths) == (None, None, {}, (None, None))


@pytest.mark.parametrize(("in_flight", "missing"), [(10, 0), (7, 3), (15, -5)])
def test_the_token_balance_shows_what_is_missing(tmp_path: Path, in_flight: int, missing: int) -> None:
    tokens = {
        "generated": 100,
        "trained": 60,
        "filtered": 20,
        "aborted": 6,
        "discarded": 4,
        "in_flight": in_flight,
    }
    summary = {"kind": "summary", **{f"tokens/{k}": v for k, v in tokens.items()}}
    balance = headline(run_of(tmp_path, *STEPS, summary)).tokens
    assert balance is not None
    assert balance.missing == missing


def test_staleness_falls_back_to_the_metrics_without_a_ledger(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "train/step": s, "staleness/mean": mean, "staleness/max": worst}
        for s, mean, worst in ((0, 0.0, 0), (1, 0.5, 2))
    ]
    n = headline(run_of(tmp_path, *rows))
    assert (n.staleness_mean, n.staleness_max) == (0.25, 2)


def test_mean_timings_by_hand(tmp_path: Path) -> None:
    assert mean_timings(run_of(tmp_path, *STEPS)) == {"wait_for_batch": 4.0, "update": 2.0}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("eval/heldout/avg@1", "eval/a/avg@1"), "eval/heldout/avg@1"),
        (("eval/heldout_greedy/avg@1", "eval/test/avg@4", "eval/test/pass@4"), "eval/test/avg@4"),
        (("eval/heldout_greedy/avg@1",), None),
        ((), None),
    ],
)
def test_sampled_accuracy_is_found_under_any_name(
    tmp_path: Path, names: tuple[str, ...], expected: str | None
) -> None:
    row = {"kind": "eval", "eval/weight_version": 0, **dict.fromkeys(names, 0.5)}
    assert accuracy_name(run_of(tmp_path, row)) == expected


def test_throughput_is_over_the_time_from_all_up_to_the_last_step(tmp_path: Path) -> None:
    """Start-up and the last evaluation, here 20 of 30 s, are not in it."""
    rows = [
        {**STEPS[1], "train/step": s, "run/seconds": t, "time/step_s": 5.0, "rollout/tokens_per_s": 12.0}
        for s, t in ((0, 25.0), (1, 30.0))
    ]
    n = headline(run_of(tmp_path, *rows))
    assert (n.seconds, n.tokens_per_s, n.generated_per_s, n.steps_per_s) == (30.0, 80 / 10, 120 / 10, 2 / 10)


def test_counts_are_summed_over_the_steps(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "train/step": s, "coord/pull_count": 2, "rollout/preemptions": s} for s in range(3)
    ]
    assert headline(run_of(tmp_path, *rows)).counts == {"pulls": 6, "preemptions": 3}


def test_the_bound_is_the_ledger_s_and_only_without_one_the_config_s(tmp_path: Path) -> None:
    """Policy sync keeps 0, whatever the config says."""
    config, start = "staleness: {bound: 3}\n", {"kind": "start", "bound": 0}
    assert headline(run_of(tmp_path / "a", *STEPS, ledger=(start,), config=config)).bound == 0
    assert headline(run_of(tmp_path / "b", *STEPS, config=config)).bound == 3


def test_mean_lengths_weigh_each_step_by_its_trajectories(tmp_path: Path) -> None:
    rows = [
        {
            "kind": "train",
            "train/step": 0,
            "lengths/sampled/8": 3,
            "lengths/sampled/mean": 10.0,
            "lengths/trained/8": 1,
            "lengths/trained/mean": 9.0,
        },
        {"kind": "train", "train/step": 1, "lengths/sampled/16": 1, "lengths/sampled/mean": 30.0},
    ]
    assert headline(run_of(tmp_path, *rows)).lengths == (15.0, 9.0)


def test_without_recorded_lengths_those_trained_on_are_the_ledger_s(tmp_path: Path) -> None:
    """A masked trajectory, of which nothing was trained on, has no length."""
    items = [
        {"id": str(i), "min": 0, "max": 0, "tokens": tokens, "hash": ""}
        for i, tokens in enumerate((10, 0, 20))
    ]
    record = {"kind": "trained", "step": 0, "version": 0, "trajectories": items}
    assert headline(run_of(tmp_path, *STEPS, ledger=(record,))).lengths == (None, 15.0)
