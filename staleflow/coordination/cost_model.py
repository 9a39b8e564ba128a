"""What decoding costs: the time of a decode step, its fit to measurements, and the error of the fit.

    step time (s)      t(n, kv) = k1 * kv + max(k2, k3 * n) + k4
    throughput         T(n, kv) = n / t(n, kv)   tokens per second

with n trajectories running and kv tokens in the KV cache: k1 reads one cached token, k2 is the floor of
loading the weights, k3 the arithmetic of one trajectory, k4 the fixed cost of a step (StaleFlow paper, cost
model). `staleflow profile` measures an engine and fits the constants; `estimates.py` refines them during a
run.

The fit also has prefill * (tokens that joined in the step) as a term. Invariants: no constant is negative;
errors are relative, so short steps weigh as much as long ones; the fit is the exact optimum over the knee
positions tried, and depends on the points alone.

It has two stages. The knee n = k2 / k3 is a nonlinear unknown, but for a given position (at a measured
running count, or between two) the model is linear in its constants. The inner stage solves that by
non-negative least squares, the outer stage picks the position with the least error. With at most five
unknowns, trying which of them are zero makes non-negative least squares exact: the optimum is the plain
least-squares solution of the unknowns that are not zero.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from operator import mul

from staleflow.errors import UserError

MOST_KNEES = 16
"""Knee positions that the outer stage tries: more than a profile measures, few enough for a refit."""
_SINGULAR = 1e-9
"""Pivot, of columns scaled to length 1, below which unknowns cannot be told apart."""
_LEAST_SHARE = 1e-3
"""Least share of the shortest step that is fixed cost, so that no step takes zero time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Constants of one kind of instance, in seconds, none negative.

    Models used for decisions have k4 + max(k2, k3) > 0 (the fit and the file's loader ensure it); all zero is
    for engines that take no time.
    """

    k1: float
    """Per cached token and step."""
    k2: float
    """Per step, at least."""
    k3: float
    """Per running trajectory and step."""
    k4: float
    """Per step."""
    prefill: float
    """Per token whose KV is built."""
    pull: float = 0.0
    """Per pull, without rebuilding KV."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in astuple(self)):
            raise ValueError(f"every constant of a cost model must be a finite number >= 0: {self}")

    def step_s(self, running: float, kv_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * running) + self.k4

    def throughput(self, running: float, kv_tokens: float) -> float:
        """Tokens per second of an instance; 0 when nothing runs. The step must take time."""
        return running / self.step_s(running, kv_tokens) if running > 0 else 0.0

    def gain(self, running: int, kv_tokens: float, length: float) -> float:
        """ΔT of one more trajectory, holding `length` tokens, in tokens per second. May be negative."""
        # throughput(running + 1, kv_tokens + length) - throughput(running, kv_tokens), inlined: routing
        # evaluates it twice per trajectory.
        k1, k2, k3, k4 = self.k1, self.k2, self.k3, self.k4
        more = running + 1
        after = more / (k1 * (kv_tokens + length) + (k3 * more if k3 * more > k2 else k2) + k4)
        if running <= 0:
            return after
        return after - running / (k1 * kv_tokens + (k3 * running if k3 * running > k2 else k2) + k4)

    def ideal_gain(self, length: float) -> float:
        """ΔT_ideal: the gain on an empty instance."""
        return self.gain(0, 0.0, length)

    def prefill_s(self, tokens: float) -> float:
        """Seconds to build the KV of `tokens`; the instance decodes nothing meanwhile."""
        return self.prefill * tokens


START_VALUES = CostModel(k1=2e-8, k2=4e-3, k3=1e-4, k4=1e-3, prefill=5e-5, pull=0.1)
"""Start of a run without a profile: the order of magnitude of a small model, until reports refine it."""


# ---------------------------------------------------------------------- measurements


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
    """Weight of its squared relative error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """Building the KV of `tokens` at once."""

    tokens: float
    seconds: float
    """Above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """|predicted - measured| / measured over a set of points; NaN without points."""

    mean: float
    p90: float
    """90 % of the points have at most this error."""
    max: float
    points: int


# ---------------------------------------------------------------------- fitting


def fit_cost_model(
    points: Sequence[StepPoint], prefill: Sequence[PrefillPoint] = (), pull_s: float = 0.0
) -> CostModel:
    """The best-fitting constants of a profile. Raises UserError if the points do not determine them."""
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
            f"a cost model needs steps with at least two running counts, but there is {found}: measure more"
        )
    rows = [(p.kv_tokens / p.seconds, p.running / p.seconds, 1 / p.seconds) for p in points]
    gram = gram_matrix(list(zip(*rows, strict=True)))
    if _solve(gram, [0.0, 0.0, 0.0]) is None:
        raise UserError(
            "a cost model needs steps whose cached tokens vary for the same running count, but in the steps "
            "measured they follow from it: measure at least two context lengths"
        )


def fit_steps(points: Sequence[StepPoint], knees: Sequence[float] | None = None) -> CostModel:
    """Minimize the sum of weighted squared relative errors; unknowns that no point involves are 0.

    `knees`: running counts at which the knee may lie; default: the measured ones, at most MOST_KNEES.
    """
    counts = sorted({point.running for point in points})
    if knees is None:
        step = max(1, math.ceil(len(counts) / MOST_KNEES))
        knees = counts[::step]
    best, least = None, float("inf")
    for knee, columns, following in _linear_forms(points, counts, knees):
        targets = [math.sqrt(point.weight) for point in points]
        found, error = nnls(gram_matrix(columns), [sum(map(mul, c, targets)) for c in columns])
        if following is None:
            k1, k3, k4, prefill = found
            k2 = k3 * knee
        else:
            k1, k2, k3, k4, prefill = found
            if not k3 * knee <= k2 <= k3 * following:
                continue  # the solution puts the knee elsewhere, and another position fits better
        if error < least - 1e-12:
            best, least = (k1, k2, k3, k4, prefill), error
    if best is None:
        raise UserError("a cost model needs measured steps, but there are none")
    k1, k2, k3, k4, prefill = best
    if max(k2, k3) + k4 <= 0:
        k4 = _LEAST_SHARE * min(point.seconds for point in points)
    return CostModel(k1=k1, k2=k2, k3=k3, k4=k4, prefill=prefill)


def _linear_forms(
    points: Sequence[StepPoint], counts: Sequence[float], knees: Sequence[float]
) -> Iterator[tuple[float, list[list[float]], float | None]]:
    """For each knee position, the columns of the problem's unknowns.

    (knee, columns, None): at that count (0: no knee); the unknowns are k1, k3, k4, prefill.
    (knee, columns, next count): between the two; k2 is an unknown as well, placed before k3.
    """
    scale = [math.sqrt(point.weight) / point.seconds for point in points]
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
    """The x >= 0 that minimizes x·Gx - 2 m·x, and the minimum: non-negative least squares.

    `gram` is G = A^T A (symmetric, positive semi-definite) and `moment` m = A^T b of the problem |Ax - b|².
    Exact up to rounding; meant for a handful of unknowns.
    """
    size = len(moment)
    norms = [math.sqrt(gram[i][i]) for i in range(size)]
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
                return best, least  # the unconstrained optimum is non-negative
    return best, least


def gram_matrix(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """The dot products of all pairs of columns."""
    size = len(columns)
    gram = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i, size):
            gram[i][j] = gram[j][i] = sum(map(mul, columns[i], columns[j]))
    return gram


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Solution of a symmetric positive definite system; None if it is singular."""
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


# ---------------------------------------------------------------------- error of the fit


def predicted_s(model: CostModel, point: StepPoint) -> float:
    """Predicted seconds of the step."""
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
    """Error of the step times by running count (few, many) and context length (short, long).

    A point is `many` from that running count on, `long` from that mean number of tokens per trajectory on.
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
        p90=ranked[math.ceil(0.9 * len(ranked)) - 1],
        max=ranked[-1],
        points=len(ranked),
    )
