"""The cost model of a run, refined from what instances report.

Invariants: an observation is predicted before it is learned from, so `error` is never flattered; with
`refine` off nothing is learned; a constant changes only by a refit (the pull's by each pull seen), is never
negative, and no refit takes a step's below `_KEPT_SHARE` of what it was, so that noise cannot zero it.

An observation is the difference between two reports of one incarnation: mean running count, cached tokens
and joining tokens of the steps between, and the mean time of a step. Of many instances only some pairs of
reports are looked at, so that the cost for `Control` stays the same.

A refit knows two things apart. *How fast* all is shows in any observation: the old constants are scaled by
the median of measured over predicted. *Which part* costs what shows only when load varies: so the scaled
old model joins the fit as points of little weight, which decide where the observations are silent.

Prefill is learned from pulls that rebuild KV, where it takes most of the time, and from the steps in which
trajectories join, where it is lost in the noise, only as long as there are none, or while that rate exceeds
what most steps took: prompts that a group shares may be far cheaper to take in than KV is to rebuild.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from operator import mul
from statistics import median
from typing import NamedTuple

from staleflow.coordination.cost_fit import StepPoint, fit_steps, gram_matrix, nnls, predicted_s
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.reports import InstanceReport

WINDOW = 128
"""Observations that a refit looks at: some seconds to a minute of a run."""
FIRST_REFIT = 16
"""Observations before the first refit; then twice as many each time, up to REFIT_EVERY."""
REFIT_EVERY = 512
"""A refit takes some 15 ms: this keeps an observation at some 40 µs in the mean."""
LOOKED_AT = 16
"""Instances of which, about, a pair of reports is looked at in one round of all."""
ERROR_MEMORY = 0.05
"""Weight of the newest observation in `error`: about the last twenty count."""
PULLS = 32
"""Pulls that are looked at."""
_PRIOR_SHARE = 0.1
"""Weight of the old model in a refit, as a share of the window's."""
_KEPT_SHARE = 0.1
_PREFILL_TRIED = 64
"""Joining tokens at which the old model is asked."""
_KNEES = 6
"""Places of the knee that a refit tries, beside the old one."""


class _Counters(NamedTuple):
    """A report's figures since the incarnation started."""

    incarnation: int
    steps: int
    running: int
    kv_tokens: int
    busy_s: float
    prefilled: int
    pulls: int
    pull_s: float
    rebuilt: int


class OnlineCosts:
    """Starts with a model; `observe` refines it, if `refine` is set, and in any case tells its `error`."""

    def __init__(self, start: CostModel, refine: bool = True) -> None:
        self._model = start
        self._refine = refine
        self._error: float | None = None
        self._window: deque[StepPoint] = deque(maxlen=WINDOW)
        self._since_refit = 0
        self._refit_at = FIRST_REFIT
        self._pulls: deque[tuple[float, float]] = deque(maxlen=PULLS)  # tokens rebuilt, seconds
        self._names: set[str] = set()
        self._begun: dict[str, _Counters] = {}  # pairs of which the first report was seen
        self._reports = 0

    @property
    def model(self) -> CostModel:
        """The constants now."""
        return self._model

    @property
    def error(self) -> float | None:
        """Mean of |predicted - measured| / measured over the last observations; None before the first."""
        return self._error

    def observe(self, report: InstanceReport) -> None:
        """Take a report in. Reports of one incarnation come in order."""
        self._reports += 1
        self._names.add(report.instance)
        # Odd, so that it is in step with no round of a power of two of instances.
        due = self._reports % (len(self._names) // LOOKED_AT | 1) == 0
        last = self._begun.get(report.instance)
        if last is None and not due:
            return
        now = _counters(report)
        if last is not None and last.incarnation == now.incarnation:
            if now.steps == last.steps:
                return  # it was idle: the pair goes on
            if self._refine and now.pulls > last.pulls:
                self._learn_pull(last, now)
            if now.busy_s > last.busy_s:
                self._learn_step(_point(last, now))
        if due:
            self._begun[report.instance] = now
        else:
            del self._begun[report.instance]

    def _learn_pull(self, last: _Counters, now: _Counters) -> None:
        pulls = now.pulls - last.pulls
        seconds = (now.pull_s - last.pull_s) / pulls
        if seconds > 0:
            self._pulls.append(((now.rebuilt - last.rebuilt) / pulls, seconds))
            pull, prefill = pull_costs(self._model, tuple(self._pulls))
            self._model = replace(self._model, pull=pull, prefill=prefill)

    def _learn_step(self, point: StepPoint) -> None:
        error = abs(predicted_s(self._model, point) / point.seconds - 1)
        self._error = error if self._error is None else self._error + ERROR_MEMORY * (error - self._error)
        if not self._refine:
            return
        self._window.append(point)
        self._since_refit += 1
        if self._since_refit >= self._refit_at:
            self._since_refit = 0
            self._refit_at = min(2 * self._refit_at, REFIT_EVERY)
            known = any(rebuilt for rebuilt, _ in self._pulls)
            self._model = refitted(self._model, tuple(self._window), keep_prefill=known)


def refitted(model: CostModel, points: Sequence[StepPoint], *, keep_prefill: bool = False) -> CostModel:
    """The model after a look at these points, which need not tell all constants apart. Pull is kept."""
    ratios = [point.seconds / max(predicted_s(model, point), 1e-12) for point in points]
    old = _scaled(model, median(ratios))
    prior = _asked(old, points)
    rest = _without(model.prefill, points)
    keep_prefill = keep_prefill and 2 * len(rest) > len(points)
    if keep_prefill:
        points, prior = rest, _without(old.prefill, prior)
    knees = _spread({point.running for point in points}, _KNEES)
    if old.k3 > 0:
        knees.append(old.k2 / old.k3)
    new = fit_steps([*points, *prior], knees)
    # Again, with those that the first fit cannot explain (a machine that paused) counting less.
    errors = [abs(predicted_s(new, point) / point.seconds - 1) for point in points]
    usual = 2 * median(errors)
    if max(errors) > usual > 0:
        pairs = zip(points, errors, strict=True)
        calmed = [replace(p, weight=usual / error) if error > usual else p for p, error in pairs]
        new = fit_steps([*calmed, *prior], knees)
    return CostModel(
        k1=max(new.k1, _KEPT_SHARE * old.k1),
        k2=max(new.k2, _KEPT_SHARE * old.k2),
        k3=max(new.k3, _KEPT_SHARE * old.k3),
        k4=max(new.k4, _KEPT_SHARE * old.k4),
        prefill=model.prefill if keep_prefill else max(new.prefill, _KEPT_SHARE * old.prefill),
        pull=model.pull,
    )


def pull_costs(model: CostModel, pulls: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(pull, prefill) after a look at pulls: (tokens rebuilt, seconds above 0) each.

    As for the steps, the old constants, scaled, decide what the pulls do not show.
    """
    told = [model.pull + model.prefill_s(rebuilt) for rebuilt, _ in pulls]
    factor = median(seconds / max(old, 1e-12) for (_, seconds), old in zip(pulls, told, strict=True))
    most = max(rebuilt for rebuilt, _ in pulls)
    asked = [(0.0, factor * model.pull), (most, factor * (model.pull + model.prefill_s(most)))]
    weight = sqrt(_PRIOR_SHARE * len(pulls) / len(asked))
    rows = [(1 / s, rebuilt / s, 1.0) for rebuilt, s in pulls]
    rows += [(weight / s, weight * rebuilt / s, weight) for rebuilt, s in asked if s > 0]
    own, token, one = zip(*rows, strict=True)
    (pull, prefill), _ = nnls(gram_matrix([own, token]), [sum(map(mul, c, one)) for c in (own, token)])
    return pull, prefill if most > 0 else model.prefill


def _scaled(model: CostModel, factor: float) -> CostModel:
    return replace(
        model,
        k1=model.k1 * factor,
        k2=model.k2 * factor,
        k3=model.k3 * factor,
        k4=model.k4 * factor,
        prefill=model.prefill * factor,
    )


def _without(prefill: float, points: Sequence[StepPoint]) -> list[StepPoint]:
    """The points less so many seconds for each token that joined."""
    kept = [(point, point.seconds - prefill * point.prefilled) for point in points]
    return [replace(point, seconds=seconds, prefilled=0.0) for point, seconds in kept if seconds > 0]


def _asked(model: CostModel, points: Sequence[StepPoint]) -> list[StepPoint]:
    """What the model says around the points: from one trajectory to twice the most, with short to long KV."""
    most = max(point.running for point in points)
    context = median(point.kv_tokens / point.running for point in points)
    asked = [
        StepPoint(running=running, kv_tokens=running * length, seconds=0.0, prefilled=prefilled)
        for running in (1.0, most / 2, most, 2 * most)
        for length in (0.0, context, 4 * context)
        for prefilled in (0.0, _PREFILL_TRIED)
    ]
    weight = _PRIOR_SHARE * len(points) / len(asked)
    told = [replace(point, seconds=predicted_s(model, point), weight=weight) for point in asked]
    return [point for point in told if point.seconds > 0]


def _spread(values: set[float], most: int) -> list[float]:
    """At most so many of the values, evenly by rank."""
    ranked = sorted(values)
    if len(ranked) <= most:
        return ranked
    return [ranked[i * (len(ranked) - 1) // (most - 1)] for i in range(most)]


def _counters(report: InstanceReport) -> _Counters:
    return _Counters(
        report.incarnation,
        report.decode_steps,
        report.running_steps,
        report.kv_token_steps,
        report.busy_seconds,
        report.prefilled_tokens,
        report.pulls,
        report.pull_seconds,
        report.rebuilt_tokens,
    )


def _point(last: _Counters, now: _Counters) -> StepPoint:
    """The mean step between two reports."""
    steps = now.steps - last.steps
    return StepPoint(
        running=(now.running - last.running) / steps,
        kv_tokens=(now.kv_tokens - last.kv_tokens) / steps,
        seconds=(now.busy_s - last.busy_s) / steps,
        prefilled=(now.prefilled - last.prefilled) / steps,
    )
