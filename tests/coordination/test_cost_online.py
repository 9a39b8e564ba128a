"""The cost model of a run: learned from reports, judged before it learns, and hard to mislead."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest

from staleflow.coordination.cost_model import START_VALUES, CostModel, StepPoint, step_error
from staleflow.coordination.estimates import FIRST_REFIT, OnlineCosts, pull_costs, refitted
from staleflow.coordination.events import InstanceReport

TRUE = CostModel(k1=4e-6, k2=5e-3, k3=2e-4, k4=3e-3, prefill=3e-5, pull=0.02)


def first(instance: str = "i0", incarnation: int = 1) -> InstanceReport:
    return InstanceReport(instance=instance, incarnation=incarnation, revision=0, version=0, acked_seq=0)


def after(
    last: InstanceReport,
    *,
    running: int,
    kv_tokens: int,
    steps: int = 5,
    joined: int = 0,
    rebuilt: int | None = None,
    true: CostModel = TRUE,
    slower: float = 1.0,
) -> InstanceReport:
    """The next report of an instance that behaves as `true` says; `rebuilt`: it pulled meanwhile."""
    pulled = rebuilt is not None
    seconds = steps * true.step_s(running, kv_tokens) + true.prefill_s(joined)
    return last._replace(
        revision=last.revision + 1,
        decode_steps=last.decode_steps + steps,
        running_steps=last.running_steps + steps * running,
        kv_token_steps=last.kv_token_steps + steps * kv_tokens,
        busy_seconds=last.busy_seconds + seconds * slower,
        prefilled_tokens=last.prefilled_tokens + joined,
        pulls=last.pulls + pulled,
        pull_seconds=last.pull_seconds + (true.pull + true.prefill_s(rebuilt or 0) if pulled else 0.0),
        rebuilt_tokens=last.rebuilt_tokens + (rebuilt or 0),
    )


def busy_run(
    seed: int, reports: int, *, instances: int = 2, most: int = 96, spikes: float = 0.0
) -> Iterator[InstanceReport]:
    """Reports of instances whose load varies, with some noise; `spikes`: share that is ten times too slow."""
    drawn = random.Random(seed)
    last = [first(f"i{i}") for i in range(instances)]
    for k in range(reports):
        running = drawn.randint(1, most)
        kv_tokens = running * drawn.randint(10, 80)
        slower = drawn.lognormvariate(0, 0.03) * (10 if drawn.random() < spikes else 1)
        last[k % instances] = after(
            last[k % instances],
            running=running,
            kv_tokens=kv_tokens,
            joined=drawn.choice([0, 0, 8, 16]),
            rebuilt=kv_tokens if drawn.random() < 0.02 else None,
            slower=slower,
        )
        yield last[k % instances]


def grid_error(model: CostModel) -> float:
    """Largest relative error over loads that the run above has."""
    grid = [(n, n * context) for n in (1, 8, 32, 64, 96) for context in (10, 80)]
    return step_error(
        model, [StepPoint(running=n, kv_tokens=kv, seconds=TRUE.step_s(n, kv)) for n, kv in grid]
    ).max


def test_the_run_teaches_a_model_that_starts_far_off() -> None:
    costs = OnlineCosts(START_VALUES)
    assert grid_error(costs.model) > 0.3
    for report in busy_run(0, 2000):
        costs.observe(report)
    assert grid_error(costs.model) < 0.06
    assert costs.error is not None
    assert costs.error < 0.06
    assert costs.model.prefill == pytest.approx(TRUE.prefill, rel=0.05)
    assert costs.model.pull == pytest.approx(TRUE.pull, rel=0.05)


def test_a_machine_that_pauses_now_and_then_does_not_mislead_it() -> None:
    costs = OnlineCosts(START_VALUES)
    for report in busy_run(1, 2000, spikes=0.03):
        costs.observe(report)
    assert grid_error(costs.model) < 0.1


def test_prompts_that_are_far_cheaper_to_take_in_than_kv_is_to_rebuild_do_not_hide_the_steps() -> None:
    """A shared prompt costs next to nothing; at the rate learned from pulls it would exceed every step."""
    rebuilding = replace(TRUE, prefill=1e-2)
    points = [
        StepPoint(running=n, kv_tokens=20.0 * n, seconds=TRUE.step_s(n, 20 * n), prefilled=8.0)
        for n in range(1, 33)
    ]
    found = refitted(rebuilding, points, keep_prefill=True)
    assert step_error(found, points).mean < 0.1
    assert refitted(found, points, keep_prefill=True).k2 > 0


def test_it_is_judged_before_it_learns() -> None:
    """The first observation is predicted with the start values."""
    costs = OnlineCosts(START_VALUES)
    report = after(first(), running=8, kv_tokens=100)
    costs.observe(first())
    assert costs.error is None
    costs.observe(report)
    assert costs.error == pytest.approx(1 - START_VALUES.step_s(8, 100) / TRUE.step_s(8, 100))


def test_without_refinement_the_file_is_kept_and_judged() -> None:
    start = replace(TRUE, k4=TRUE.k4 * 3)
    costs = OnlineCosts(start, refine=False)
    for report in busy_run(2, 500):
        costs.observe(report)
    assert costs.model == start
    assert costs.error is not None
    assert costs.error > 0.1


def test_a_load_that_never_varies_changes_the_speed_and_keeps_the_shape() -> None:
    costs = OnlineCosts(replace(TRUE, pull=0.0))
    report = first()
    for _ in range(400):
        costs.observe(report)
        report = after(report, running=60, kv_tokens=2400, slower=2.0)
    assert costs.model.step_s(60, 2400) == pytest.approx(2 * TRUE.step_s(60, 2400), rel=0.01)
    for n, kv in ((1, 40), (30, 1200), (90, 8000)):
        assert costs.model.step_s(n, kv) == pytest.approx(2 * TRUE.step_s(n, kv), rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_no_constant_is_ever_negative_or_lost_in_noise(seed: int) -> None:
    drawn = random.Random(seed)
    costs = OnlineCosts(TRUE)
    report = first()
    for _ in range(300):
        before = costs.model
        costs.observe(report)
        report = after(
            report,
            running=drawn.randint(1, 4),
            kv_tokens=drawn.randint(4, 40),
            joined=drawn.choice([0, 30]),
            rebuilt=drawn.choice([None, None, 9]),
            slower=drawn.lognormvariate(0, 2),
        )
        assert min(astuple(costs.model)) >= 0
        if costs.model.k1 != before.k1:
            slowed = [a / b for a, b in zip(astuple(costs.model)[:4], astuple(before)[:4], strict=True)]
            assert min(slowed) > 0


def test_a_new_incarnation_is_not_compared_with_the_old_one() -> None:
    costs = OnlineCosts(TRUE)
    report = first()
    for _ in range(3):
        costs.observe(report)
        report = after(report, running=8, kv_tokens=80)
    assert costs.error == pytest.approx(0, abs=1e-9)
    costs.observe(after(first(incarnation=2), running=90, kv_tokens=9, slower=9.0))
    assert costs.error == pytest.approx(0, abs=1e-9)


def test_an_idle_instance_teaches_nothing() -> None:
    costs = OnlineCosts(START_VALUES)
    for revision in range(3 * FIRST_REFIT):
        costs.observe(first()._replace(revision=revision, pull_seconds=float(revision)))
    assert costs.model == START_VALUES
    assert costs.error is None


def test_instances_on_a_clock_that_stands_still_teach_nothing() -> None:
    """As in inline runs of the torch engine, whose clock is virtual."""
    costs = OnlineCosts(START_VALUES)
    report = first()
    for _ in range(3 * FIRST_REFIT):
        costs.observe(report)
        report = after(report, running=8, kv_tokens=80, slower=0.0)
    assert costs.model == START_VALUES


@pytest.mark.parametrize("start", [replace(TRUE, pull=1.0), replace(TRUE, prefill=1e-2), START_VALUES])
def test_pulls_are_told_apart_from_the_rebuilding_in_them(start: CostModel) -> None:
    costs = OnlineCosts(start)
    report = first()
    for tokens in (2000, 100, 700, 3000, 1500) * 10:
        costs.observe(report)
        report = after(report, running=50, kv_tokens=tokens, rebuilt=tokens)
    assert costs.model.pull == pytest.approx(TRUE.pull, rel=0.1)
    assert costs.model.prefill == pytest.approx(TRUE.prefill, rel=0.1)


def test_pulls_that_rebuild_nothing_leave_prefill_alone() -> None:
    model = replace(TRUE, pull=5.0)
    pull, prefill = pull_costs(model, [(0.0, 0.02), (0.0, 0.02), (0.0, 0.02)])
    assert pull == pytest.approx(0.02)
    assert prefill == TRUE.prefill


def test_refitting_takes_no_constant_to_zero_at_once() -> None:
    no_attention = replace(TRUE, k1=0.0)
    points = [
        StepPoint(running=n, kv_tokens=n * c, seconds=no_attention.step_s(n, n * c))
        for n in (1, 8, 32, 96)
        for c in (10, 80)
    ]
    once = refitted(TRUE, points)
    assert once.k1 > 0
    assert refitted(once, points).k1 < once.k1


def test_observing_is_cheap_for_many_instances_too() -> None:
    for instances, at_most_us in ((2, 2000), (1024, 200)):  # measured: some 60 and 5
        costs = OnlineCosts(START_VALUES)
        reports = list(busy_run(3, 6000, instances=instances))
        began = time.process_time()
        for report in reports:
            costs.observe(report)
        assert (time.process_time() - began) / len(reports) * 1e6 < at_most_us
        assert costs.error is not None
