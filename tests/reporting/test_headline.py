"""The numbers of a report, worked out by hand from small runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staleflow.reporting.headline import (
    ABSENT,
    accuracy_name,
    bottleneck,
    config_differences,
    headline,
    idle_share,
    instance_names,
    mean_timings,
)
from staleflow.reporting.load import RunData, load_run


def run_of(
    tmp_path: Path, *rows: dict[str, Any], ledger: tuple[dict[str, Any], ...] = (), config: str = ""
) -> RunData:
    tmp_path.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", rows), ("ledger.jsonl", ledger)):
        if lines:
            (tmp_path / name).write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(config)
    return load_run(tmp_path)


STEPS = (
    {
        "kind": "train",
        "train/step": 0,
        "run/seconds": 10.0,
        "timing_s/wait_for_batch": 6.0,
        "timing_s/update": 1.0,
    },
    {
        "kind": "train",
        "train/step": 1,
        "run/seconds": 20.0,
        "timing_s/wait_for_batch": 2.0,
        "timing_s/update": 3.0,
        "tokens/generated": 100,
        "tokens/trained": 80,
        "tokens/filtered": 10,
        "tokens/in_flight": 10,
    },
)


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
    assert n.trainer_waiting == 8 / 20
    assert n.instances_idle == 3 / 8
    assert n.reason == "still going or killed"


def test_what_was_not_measured_is_none(tmp_path: Path) -> None:
    n = headline(run_of(tmp_path, {"kind": "train", "train/step": 0}))
    assert (n.seconds, n.tokens_per_s, n.staleness_mean, n.staleness_max, n.last_accuracy, n.tokens) == (
        None,
    ) * 6
    assert bottleneck(n).startswith("bottleneck unknown")


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


@pytest.mark.parametrize(
    ("waiting", "idle", "text"),
    [
        (0.62, 0.03, "rollout-bound: the trainer waited 62% of the time, the instances idled 3%"),
        (0.02, 0.40, "train-bound: the instances idled 40% of the time, the trainer waited 2%"),
        (0.10, 0.05, "balanced: the trainer waited 10% of the time and the instances idled 5%"),
        (
            0.55,
            0.45,
            "taking turns: the trainer waited 55% of the time and the instances idled 45%, "
            "so each side stood waiting for the other",
        ),
    ],
)
def test_the_bottleneck_is_named_from_measured_waiting(
    tmp_path: Path, waiting: float, idle: float, text: str
) -> None:
    numbers = replace(headline(run_of(tmp_path, *STEPS)), trainer_waiting=waiting, instances_idle=idle)
    assert bottleneck(numbers) == text


def test_waiting_is_summed_over_the_steps_of_all_attempts(tmp_path: Path) -> None:
    """The last attempt's summary row says 2 s; both attempts together waited 8 s of 30 s."""
    first, second = STEPS
    rows = (
        first,
        {**second, "run/seconds": 0.5},
        {"kind": "summary", "run/seconds": 20.0, "wait/trainer_s": 2.0},
    )
    assert headline(run_of(tmp_path, *rows)).trainer_waiting == 8 / 30


def test_without_steps_the_summary_row_says_how_long_the_trainer_waited(tmp_path: Path) -> None:
    summary = {"kind": "summary", "run/seconds": 40.0, "wait/trainer_s": 10.0}
    assert headline(run_of(tmp_path, summary)).trainer_waiting == 0.25


def test_instances_are_named_in_the_order_of_numbers_and_may_join_late(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {"kind": "instances", "run/seconds": 0.0, "instance/i2/running": 1, "instance/i10/running": 0},
        {"kind": "instances", "run/seconds": 1.0, "instance/i2/running": 0, "instance/late/running": 5},
    )
    assert instance_names(run) == ["i2", "i10", "late"]
    assert [idle_share(run, name) for name in ("i2", "i10", "late", "absent")] == [0.5, 1.0, 0.0, None]
    assert idle_share(run) == 0.5


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


def test_config_differences_are_what_differs_but_the_name(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    runs = [
        run_of(
            tmp_path / "a", *STEPS, config="run: {name: a}\nstaleness: {bound: 0}\ndata: {n: 1, only: null}"
        ),
        run_of(tmp_path / "b", *STEPS, config="run: {name: b}\nstaleness: {bound: 1}\ndata: {n: 1}"),
    ]
    assert config_differences(runs) == {"data.only": ["null", ABSENT], "staleness.bound": ["0", "1"]}
