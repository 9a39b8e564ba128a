"""Fitting the cost model to measured times, and how far off it is.

Invariants: no constant is negative; relative errors count, so that short steps weigh as much as long ones;
the fit is the exact optimum for the places of the knee it looks at, and depends on the points alone.

    t(n, kv) = k1 * kv + max(k2, k3 * n) + k4 + prefill * tokens that joined in the step

Two stages. Where the knee n = k2 / k3 lies is a number like any other, but for a given place (at a running
count that was measured, or between two) the model is linear in its constants: the inner stage solves that by
non-negative least squares, the outer stage takes the place with the least error. With at most five unknowns,
non-negative least squares is exact by trying which of them are zero: the optimum is the plain least-squares
solution of the unknowns that are not.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, sqrt
from operator import mul

from staleflow.coordination.cost_model import CostModel
from staleflow.errors import UserError

MOST_KNEES = 16
"""Running counts that the outer stage looks at: more than a profile measures, few enough for a refit."""
_SINGULAR = 1e-9
"""Pivot, of columns scaled to length 1, below which unknowns cannot be told apart."""
_LEAST_SHARE = 1e-3
"""Share of the shortest step that at least does not depend on what runs: a step never takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One decode step, or the mean of several."""

    running: float
    """Trajectories decoded."""
    kv_tokens: float
    """Tokens of all of them."""
    seconds: float
    """Above 0."""
    prefilled: float = 0.0
    """Tokens of trajectories that joined in the step."""
    weight: float = 1.0
    """How much its squared relative error counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """Building the KV of so many tokens at once."""

    tokens: float
    seconds: float
    """Above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """|predicted - measured| / measured over some points; NaN without points."""

    mean: float
    p90: float
    """Nine in ten are at most this."""
    max: float
    points: int


# ---------------------------------------------------------------------- fitting


def fit_cost_model(
    points: Sequence[StepPoint], prefill: Sequence[PrefillPoint] = (), pull_s: float = 0.0
) -> CostModel:
    """The constants that fit a profile best. Raises UserError when the points cannot tell them apart."""
    _check(points)
    fitted = fit_steps(points)
    rates = [(point.tokens / point.seconds) for point in prefill]
    per_token = sum(rates) / sum(rate * rate for rate in rates) if any(rates) else fitted.prefill
    return CostModel(k1=fitted.k1, k2=fitted.k2, k3=fitted.k3, k4=fitted.k4, prefill=per_token, pull=pull_s)


def _check(points: Sequence[StepPoint]) -> None:
    counts = sorted({point.running for point in points})
    if len(counts) < 2:
        found = f"only {counts[0]:g}" if counts else "none"
        raise UserError(
            f"a cost model needs steps with at least two running counts, and there is {found}: measure more"
        )
    rows = [(p.kv_tokens / p.seconds, p.running / p.seconds, 1 / p.seconds) for p in points]
    gram = gram_matrix(list(zip(*rows, strict=True)))
    if _solve(gram, [0.0, 0.0, 0.0]) is None:
        raise UserError(
            "a cost model needs steps in which the cached tokens vary for the same running count, and they "
            "follow from it in all that was measured: measure at least two context lengths"
        )


def fit_steps(points: Sequence[StepPoint], knees: Sequence[float] | None = None) -> CostModel:
    """The least sum of weighted squared relative errors; unknowns that no point shows are 0.

    `knees`: running counts at which the knee may lie; default: those measured, at most MOST_KNEES of them.
    """
    counts = sorted({point.running for point in points})
    if knees is None:
        step = max(1, ceil(len(counts) / MOST_KNEES))
        knees = counts[::step]
    best, least = None, float("inf")
    for knee, columns, following in _linear_forms(points, counts, knees):
        targets = [sqrt(point.weight) for point in points]
        found, error = nnls(gram_matrix(columns), [sum(map(mul, c, targets)) for c in columns])
        if following is None:
            k1, k3, k4, prefill = found
            k2 = k3 * knee
        else:
            k1, k2, k3, k4, prefill = found
            if not k3 * knee <= k2 <= k3 * following:
                continue  # it says the knee is elsewhere: another place fits better than this
        if error < least - 1e-12:
            best, least = (k1, k2, k3, k4, prefill), error
    if best is None:
        raise UserError("a cost model needs measured steps, and there are none")
    k1, k2, k3, k4, prefill = best
    if max(k2, k3) + k4 <= 0:
        k4 = _LEAST_SHARE * min(point.seconds for point in points)
    return CostModel(k1=k1, k2=k2, k3=k3, k4=k4, prefill=prefill)


def _linear_forms(
    points: Sequence[StepPoint], counts: Sequence[float], knees: Sequence[float]
) -> Iterator[tuple[float, list[list[float]], float | None]]:
    """For each place of the knee the columns of the problem's unknowns.

    (knee, columns, None): at that count (0: there is none); the unknowns are k1, k3, k4, prefill.
    (knee, columns, next count): between the two; k2 is an unknown too, in front of k3.
    """
    scale = [sqrt(point.weight) / point.seconds for point in points]
    running = [point.running for point in points]
    kv = list(map(mul, scale, [point.kv_tokens for point in points]))
    joined = list(map(mul, scale, [point.prefilled for point in points]))
    for knee in [0.0, *knees]:
        yield knee, [kv, [max(n, knee) * s for n, s in zip(running, scale, strict=True)], scale, joined], None
        following = next((count for count in counts if count > knee), None)
        if knee > 0 and following is not None:
            below = [s if n <= knee else 0.0 for n, s in zip(running, scale, strict=True)]
            above = [n * s if n > knee else 0.0 for n, s in zip(running, scale, strict=True)]
            yield knee, [kv, below, above, scale, joined], following


def nnls(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> tuple[list[float], float]:
    """The x >= 0 with the least x·Gx - 2 m·x, and that value: non-negative least squares.

    `gram` is G = A^T A (symmetric, positive semi-definite) and `moment` m = A^T b of the problem |Ax - b|².
    Exact up to rounding; meant for a handful of unknowns.
    """
    size = len(moment)
    norms = [sqrt(gram[i][i]) for i in range(size)]
    shown = [i for i in range(size) if norms[i] > 0]
    best, least = [0.0] * size, 0.0
    for count in range(len(shown), 0, -1):
        for support in combinations(shown, count):
            scaled = [[gram[i][j] / (norms[i] * norms[j]) for j in support] for i in support]
            solution = _solve(scaled, [moment[i] / norms[i] for i in support])
            if solution is None or min(solution) < 0:
                continue
            value = -sum(x * moment[i] / norms[i] for x, i in zip(solution, support, strict=True))
            if value < least:
                best, least = [0.0] * size, value
                for x, i in zip(solution, support, strict=True):
                    best[i] = x / norms[i]
            if count == len(shown):
                return best, least  # the optimum without the condition satisfies it
    return best, least


def gram_matrix(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """The dot product of each column with each."""
    size = len(columns)
    gram = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i, size):
            gram[i][j] = gram[j][i] = sum(map(mul, columns[i], columns[j]))
    return gram


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Solution of a symmetric positive definite system; None when it is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= _SINGULAR * matrix[i][i]:
            return None
        for row in rows[i + 1 :]:
            factor = row[i] / pivot
            if factor:
                for j in range(i, size + 1):
                    row[j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


# ---------------------------------------------------------------------- how far off


def predicted_s(model: CostModel, point: StepPoint) -> float:
    """What the model says that the step takes."""
    return model.step_s(point.running, point.kv_tokens) + model.prefill_s(point.prefilled)


def step_error(model: CostModel, points: Sequence[StepPoint]) -> FitError:
    """Error of the step times."""
    return _error([abs(predicted_s(model, point) / point.seconds - 1) for point in points])


def prefill_error(model: CostModel, points: Sequence[PrefillPoint]) -> FitError:
    """Error of the prefill times."""
    return _error([abs(model.prefill_s(point.tokens) / point.seconds - 1) for point in points])


def errors_by_region(
    model: CostModel, points: Sequence[StepPoint], *, many: float, long: float
) -> Mapping[str, FitError]:
    """Error of the step times where few or many trajectories run, with short or long contexts.

    `many`: running count, and `long`: mean tokens of a trajectory, from which on a point counts as such.
    """
    both = [(count, context) for count in ("few", "many") for context in ("short", "long")]
    regions: dict[tuple[str, str], list[StepPoint]] = {region: [] for region in both}
    for point in points:
        count = "many" if point.running >= many else "few"
        context = "long" if point.kv_tokens >= long * point.running else "short"
        regions[count, context].append(point)
    return {
        f"{count} running, {context} contexts": step_error(model, chosen)
        for (count, context), chosen in regions.items()
    }


def _error(errors: list[float]) -> FitError:
    if not errors:
        nan = float("nan")
        return FitError(mean=nan, p90=nan, max=nan, points=0)
    ranked = sorted(errors)
    return FitError(
        mean=sum(ranked) / len(ranked),
        p90=ranked[ceil(0.9 * len(ranked)) - 1],
        max=ranked[-1],
        points=len(ranked),
    )
