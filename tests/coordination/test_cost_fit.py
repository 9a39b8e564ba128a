"""The constants come back from synthetic steps; what the points cannot tell is refused or left at zero."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import pytest

from staleflow.coordination.cost_model import (
    CostModel,
    PrefillPoint,
    StepPoint,
    errors_by_region,
    fit_cost_model,
    fit_steps,
    nnls,
    prefill_error,
    step_error,
)
from staleflow.errors import UserError

TRUE = CostModel(k1=3e-7, k2=5e-3, k3=2e-4, k4=1e-3, prefill=4e-5, pull=0.0)
"""Knee at 25 running."""
COUNTS = (1, 4, 16, 32, 64, 128)
CONTEXTS = (10, 100, 1000)


def points(model: CostModel, counts: tuple[int, ...] = COUNTS, joins: int = 0) -> list[StepPoint]:
    """Exact steps of a model over a grid."""
    return [
        StepPoint(
            running=n,
            kv_tokens=n * context,
            seconds=model.step_s(n, n * context) + model.prefill_s(joins * (n % 3)),
            prefilled=joins * (n % 3),
        )
        for n in counts
        for context in CONTEXTS
    ]


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({}, COUNTS),  # the knee lies between two counts
        ({}, (1, 10, 25, 50, 100)),  # on a count
        ({"k2": 0.0}, COUNTS),  # no floor
        ({"k4": 0.0}, COUNTS),
        ({"k1": 0.0}, COUNTS),
    ],
)
def test_the_constants_come_back_from_exact_steps(change: dict[str, float], counts: tuple[int, ...]) -> None:
    true = replace(TRUE, **change)
    found = fit_cost_model(
        points(true, counts), [PrefillPoint(tokens=n, seconds=n * 4e-5) for n in (5, 50)], pull_s=0.25
    )
    assert astuple(found) == pytest.approx(astuple(replace(true, pull=0.25)), rel=1e-6, abs=1e-12)


def test_a_floor_that_is_never_left_is_a_fixed_cost() -> None:
    below = [p for p in points(TRUE, (1, 2, 4, 8)) if p.running <= 8]
    found = fit_steps(below)
    assert found.k1 == pytest.approx(TRUE.k1)
    assert max(found.k2, found.k3) + found.k4 == pytest.approx(TRUE.k2 + TRUE.k4)
    assert step_error(found, below).max < 1e-9


def test_prefill_is_fitted_from_the_steps_when_trajectories_join_in_them() -> None:
    found = fit_steps(points(TRUE, joins=50))
    assert astuple(found) == pytest.approx(astuple(TRUE), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_no_constant_is_negative_whatever_the_points(seed: int) -> None:
    drawn = random.Random(seed)
    noise = [replace(p, seconds=drawn.uniform(1e-4, 1e-1)) for p in points(TRUE, joins=8)]
    found = fit_cost_model(noise)
    assert min(astuple(found)) >= 0
    assert found.step_s(1, 0) > 0


def test_short_steps_count_as_much_as_long_ones() -> None:
    drawn = random.Random(1)
    noisy = [replace(p, seconds=p.seconds * drawn.uniform(0.97, 1.03)) for p in points(TRUE)]
    found = fit_cost_model(noisy)
    regions = errors_by_region(found, points(TRUE), many=25, long=100)
    assert list(regions) == [
        "few running, short contexts",
        "few running, long contexts",
        "many running, short contexts",
        "many running, long contexts",
    ]
    assert [error.points for error in regions.values()] == [3, 6, 3, 6]
    assert max(error.max for error in regions.values()) < 0.03


def test_the_fit_is_no_worse_than_any_neighbour() -> None:
    """Least squares of relative errors, checked by moving each constant a little."""
    drawn = random.Random(2)
    noisy = [replace(p, seconds=p.seconds * drawn.uniform(0.8, 1.2)) for p in points(TRUE)]

    def loss(model: CostModel) -> float:
        return sum((model.step_s(p.running, p.kv_tokens) / p.seconds - 1) ** 2 for p in noisy)

    found = fit_steps(noisy)
    for name in ("k1", "k2", "k3", "k4"):
        for factor in (0.98, 1.02):
            assert loss(found) <= loss(replace(found, **{name: getattr(found, name) * factor})) + 1e-12


def test_one_running_count_is_refused() -> None:
    with pytest.raises(UserError, match="at least two running counts, but there is only 16"):
        fit_cost_model(points(TRUE, (16,)))
    with pytest.raises(UserError, match="there is none"):
        fit_cost_model([])


def test_contexts_that_do_not_vary_are_refused() -> None:
    same = [p for p in points(TRUE) if p.kv_tokens == 100 * p.running]
    with pytest.raises(UserError, match="at least two context lengths"):
        fit_cost_model(same)


def test_points_that_tell_little_are_fitted_all_the_same() -> None:
    """As during a run, where the load may not vary: unknowns that no point shows are 0."""
    found = fit_steps([StepPoint(running=8, kv_tokens=800, seconds=0.01)] * 5)
    assert found.step_s(8, 800) == pytest.approx(0.01, rel=2e-3)
    assert found.prefill == 0
    only_kv = [StepPoint(running=1, kv_tokens=kv, seconds=kv * 1e-6) for kv in (100, 1000)]
    assert fit_steps(only_kv).step_s(1, 0) > 0  # a step never takes no time


def test_weights_decide_between_points_that_disagree() -> None:
    one, other = 0.01, 0.02
    pair = [
        StepPoint(running=8, kv_tokens=0, seconds=one, weight=1e6),
        StepPoint(running=8, kv_tokens=0, seconds=other),
    ]
    assert fit_steps(pair).step_s(8, 0) == pytest.approx(one, rel=1e-3)


def test_nnls_solves_small_problems_known_by_hand() -> None:
    # |x - (1, -2)|² has its least value over x >= 0 at (1, 0): x·x - 2 (1, -2)·x = -1 there.
    assert nnls([[1.0, 0.0], [0.0, 1.0]], [1.0, -2.0]) == ([1.0, 0.0], -1.0)
    # All moments negative: nothing is better than 0.
    assert nnls([[2.0, 1.0], [1.0, 2.0]], [-1.0, -1.0]) == ([0.0, 0.0], 0.0)
    # Two equal columns cannot be told apart: one of them takes it all.
    found, value = nnls([[1.0, 1.0], [1.0, 1.0]], [3.0, 3.0])
    assert (sum(found), value) == pytest.approx((3.0, -9.0))


@pytest.mark.parametrize("seed", range(10))
def test_nnls_meets_the_conditions_of_an_optimum(seed: int) -> None:
    """Karush, Kuhn, Tucker: the gradient is 0 where x > 0 and not negative where x = 0."""
    drawn = random.Random(seed)
    rows = [[drawn.gauss(0, 1) for _ in range(5)] for _ in range(8)]
    right = [drawn.gauss(0, 1) for _ in range(8)]
    gram = [[sum(r[i] * r[j] for r in rows) for j in range(5)] for i in range(5)]
    moment = [sum(r[i] * b for r, b in zip(rows, right, strict=True)) for i in range(5)]
    found, _ = nnls(gram, moment)
    gradient = [sum(gram[i][j] * found[j] for j in range(5)) - moment[i] for i in range(5)]
    for x, slope in zip(found, gradient, strict=True):
        assert x >= 0
        assert slope == pytest.approx(0, abs=1e-9) if x > 0 else slope >= -1e-9


def test_errors_are_relative_to_what_was_measured() -> None:
    model = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=1.0, prefill=1.0)
    measured = [StepPoint(running=1, kv_tokens=1, seconds=s) for s in (1.0, 2.0, 4.0, 0.5)]
    error = step_error(model, measured)
    assert (error.mean, error.p90, error.max, error.points) == (0.5625, 1.0, 1.0, 4)
    assert prefill_error(model, [PrefillPoint(tokens=3, seconds=2.0)]).mean == 0.5
    assert math.isnan(step_error(model, []).mean)


def test_a_cost_model_has_no_negative_constant() -> None:
    with pytest.raises(ValueError, match="finite number >= 0"):
        replace(TRUE, k1=-1e-9)
    with pytest.raises(ValueError, match="finite"):
        replace(TRUE, k4=math.inf)
