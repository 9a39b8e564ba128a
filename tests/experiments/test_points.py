"""Points of a study: the arithmetic over steps and seeds, and that a finished one is never made again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.errors import UserError
from staleflow.experiments import points
from staleflow.experiments.points import (
    Point,
    PointFile,
    PointResult,
    measure,
    measured,
    middle,
    rate_text,
    ratio_text,
    run_point,
    speedup,
)
from staleflow.reporting.spread import Spread
from staleflow.simulation.result import InstanceRow, SimulationResult, StepRow

FOUND = PointResult(
    tokens_per_s=100.0,
    step_s=10.0,
    update_s=4.0,
    trainer_idle=0.6,
    instances_idle=0.1,
    pulling=0.02,
    staleness_mean=0.5,
    staleness_max=1,
    running_mean=8.0,
    preemptions=3,
    interrupts=2,
    rollout=150.0,
    trainer=400.0,
    latency=120.0,
    cpu_s=1.0,
)
TINY = (
    "data.batch_size=4",
    "data.group_size=4",
    "rollout.max_new_tokens=512",
    "simulation.prompt_tokens=64",
    "simulation.rollout_gpus=2",
    "simulation.training_gpus=8",
)


def point(*overrides: str, measured: int = 2) -> Point:
    return Point(overrides=(*TINY, *overrides), skip=2, measured=measured)


def step(number: int, began: float, ended: float, waited: float, tokens: int) -> StepRow:
    return StepRow(
        step=number,
        began=began,
        ended=ended,
        waited=waited,
        tokens=tokens,
        trajectories=2 + number,
        staleness_mean=float(number),
        staleness_max=number,
    )


def test_the_first_steps_are_left_out_and_steps_beyond_the_last() -> None:
    rows = (step(0, 5, 6, 5, 70), step(1, 7, 10, 1, 40), step(2, 12, 14, 2, 80), step(3, 14, 99, 0, 9))
    row = InstanceRow(
        instance="instance-0",
        up=20.0,
        busy=14.0,
        prefill=1.0,
        pulling=2.0,
        generated=200,
        pulls=2,
        preemptions=3,
        running_mean=4.0,
    )
    result = SimulationResult(
        reason="interrupted",
        seconds=99.0,
        steps=rows,
        instances=(row,),
        tokens={},
        staleness={},
        commands={"interrupt": 7},
        rejections=0,
        cycles=0,
        resampled=0,
        truncated=0,
        finished=0,
        prefilled=0,
    )
    bounds = {"rollout": 30.0, "trainer": 20.0, "latency": 25.0}
    found = measured(result, skip=1, steps=3, bounds=bounds, cpu_s=0.5)
    assert found.tokens_per_s == (40 + 80) / (14 - 6)
    assert found.step_s == 4.0
    assert found.update_s == 2.5
    assert found.trainer_idle == 3 / 8
    assert found.staleness_mean == (1 * 3 + 2 * 4) / 7
    assert found.staleness_max == 2
    assert found.pulling == 0.1
    assert found.instances_idle == pytest.approx(0.2)
    assert (found.preemptions, found.interrupts) == (3, 7)
    assert (found.least, found.binding) == (20.0, "trainer")


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert rate_text(Spread.of([1200.0, 1000.0, 1100.0])) == "1,100 (1,000 to 1,200)"
    assert ratio_text(Spread.of([1.5])) == "1.50 (1.50 to 1.50)"


def test_a_speedup_compares_seed_with_seed() -> None:
    """The ratio of the medians would be 1; the ratios are 2, 1 and 0.5."""
    ours = [replace(FOUND, tokens_per_s=rate) for rate in (200.0, 100.0, 50.0)]
    theirs = [replace(FOUND, tokens_per_s=rate) for rate in (100.0, 100.0, 100.0)]
    found = speedup(ours, theirs)
    assert (found.median, found.least, found.most) == (1.0, 0.5, 2.0)


def test_the_middle_of_runs_has_each_figures_own_median() -> None:
    runs = [replace(FOUND, step_s=s, trainer_idle=t) for s, t in ((1.0, 0.3), (2.0, 0.1), (9.0, 0.2))]
    assert (middle(runs).step_s, middle(runs).trainer_idle) == (2.0, 0.2)


def test_a_point_stops_after_its_steps_and_says_its_bounds() -> None:
    found = run_point(point("run.seed=1"))
    assert found.tokens_per_s > 0
    assert found.tokens_per_s <= found.least * 1.2  # short: its lengths are not the mean ones
    assert found.staleness_max <= 1


def test_a_point_is_the_same_whenever_it_is_made() -> None:
    first, second = (replace(run_point(point("run.seed=2")), cpu_s=0.0) for _ in range(2))
    assert first == second


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="training_gpus"):
        run_point(point("simulation.training_gpus=1"))


def test_finished_points_are_found_again_and_a_torn_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "points.jsonl"
    PointFile(path).add(point("run.seed=1"), FOUND)
    with path.open("a") as file:
        file.write('{"point": "half a li')
    again = PointFile(path)
    assert again.find(point("run.seed=1")) == FOUND
    assert again.find(point("run.seed=2")) is None
    assert again.find(point("run.seed=1", measured=3)) is None
    again.add(point("run.seed=2"), FOUND)
    assert PointFile(path).find(point("run.seed=2")) == FOUND


def test_only_points_that_are_missing_are_made_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Point] = []

    def make(wanted: Iterable[Point], file: PointFile, title: str) -> None:
        for p in wanted:
            made.append(p)
            file.add(p, FOUND)

    monkeypatch.setattr(points, "_make", make)
    file = PointFile(tmp_path / "points.jsonl")
    one, two = point("run.seed=1"), point("run.seed=2")
    file.add(one, FOUND)
    assert measure([one, two, two], file, title="x") == {one: FOUND, two: FOUND}
    assert made == [two]


def test_several_processes_make_what_one_would(tmp_path: Path) -> None:
    wanted = [point(f"run.seed={seed}") for seed in (1, 2)]
    found = measure(wanted, PointFile(tmp_path / "points.jsonl"), title="x")
    assert {p: replace(m, cpu_s=0.0) for p, m in found.items()} == {
        p: replace(run_point(p), cpu_s=0.0) for p in wanted
    }


def test_what_was_finished_before_a_failure_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    wrong = point("simulation.training_gpus=1")
    measure([point("run.seed=1")], PointFile(file), title="x")
    with pytest.raises(UserError, match="training_gpus"):
        measure([wrong], PointFile(file), title="x")
    assert PointFile(file).find(point("run.seed=1")) is not None
