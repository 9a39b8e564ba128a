"""What a run learns from its instances' reports: how long responses are, and what decoding costs.

*Lengths*: means over recent responses, used for trajectories that have only begun.

*Costs*. Invariants: an observation is predicted before it is learned from, so `error` is never flattered;
with `refine` off nothing is learned; a constant changes only in a refit (that of a pull with each pull seen),
never becomes negative, and no refit takes a constant of the step time below `_KEPT_SHARE` of its old value,
so noise cannot zero it.

An observation is the difference between two reports of one incarnation: mean running count, cached tokens and
joining tokens of the steps between, and their mean time. With many instances only some pairs of reports are
used, so the cost for `Control` stays constant.

A refit separates two questions. *How fast* everything is shows in any observation: the old constants are
scaled by the median of measured over predicted. *Which part* costs what shows only when load varies: the
scaled old model joins the fit as points of little weight, which decide where the observations say nothing.

Prefill is learned from pulls that rebuild KV, because it takes most of their time. It is learned from steps
that trajectories join, where it is lost in noise, only while there are no such pulls or while their rate
exceeds the time of most steps: prompts shared by a group may be far cheaper to accept than KV is to rebuild.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from operator import mul
from statistics import median
from typing import NamedTuple

from staleflow.coordination.cost_model import (
    CostModel,
    StepPoint,
    fit_steps,
    gram_matrix,
    nnls,
    predicted_s,
)
from staleflow.coordination.events import InstanceReport

# ---------------------------------------------------------------------- lengths

GUESS_WEIGHT = 16
"""Finished trajectories that weigh as much as the first guess: the first to finish are the short ones."""
LENGTH_MEMORY = 1024
"""Finished trajectories remembered, older ones (and the guess) with decaying weight: lengths change as a
model learns, and a wrong guess must not last."""
TOLERANCE = 0.02
"""Relative distance from the mean up to which a published value stays: a mean over so few responses is not
more precise, and values cached per instance stay valid for a while."""


class LengthStatistics:
    """Means over recently finished trajectories, with a first guess."""

    def __init__(self, expected_response: int) -> None:
        """`expected_response`: the guess, in tokens."""
        self._count = float(GUESS_WEIGHT)
        self._tokens = float(GUESS_WEIGHT * expected_response)
        self._squares = float(GUESS_WEIGHT * expected_response**2)
        self._prompts = 0.0
        self._drawn = 0.0
        self.expected_growth = 0
        """Mean response length, in tokens."""
        self.expected_held = 0
        """Tokens that a running trajectory holds at a random moment: prompt + E[L²] / (2 E[L]).

        Long responses run longer, so they are observed more often than drawn, and on average half way
        through (the mean age of renewal theory).
        """
        self._publish()

    def drawn(self, prompt_length: int) -> None:
        """A group was drawn."""
        keep = 1 - 1 / LENGTH_MEMORY
        self._prompts = keep * self._prompts + prompt_length
        self._drawn = keep * self._drawn + 1
        self._publish()

    def finished(self, response_length: int) -> None:
        """A response is complete."""
        keep = 1 - 1 / LENGTH_MEMORY
        self._count = keep * self._count + 1
        self._tokens = keep * self._tokens + response_length
        self._squares = keep * self._squares + response_length**2
        self._publish()

    def _publish(self) -> None:
        growth = self._tokens / self._count
        if _is_off(self.expected_growth, growth):
            self.expected_growth = max(1, round(growth))
        prompt = self._prompts / self._drawn if self._drawn else 0.0
        held = prompt + self._squares / (2 * max(1.0, self._tokens))
        if _is_off(self.expected_held, held):
            self.expected_held = max(1, round(held))


def _is_off(published: int, mean: float) -> bool:
    return abs(mean - published) > TOLERANCE * published


# ---------------------------------------------------------------------- costs

WINDOW = 128
"""Observations that a refit uses: seconds to a minute of a run."""
FIRST_REFIT = 16
"""Observations before the first refit; the number doubles each time, up to REFIT_EVERY."""
REFIT_EVERY = 512
"""A refit takes about 15 ms, so this keeps the mean cost of an observation near 40 µs."""
OBSERVED = 16
"""Approximate number of instances of which a pair of reports is used in one round of all."""
ERROR_MEMORY = 0.05
"""Weight of the newest observation in `error`: about the last twenty matter."""
PULLS = 32
"""Latest pulls used."""
_PRIOR_SHARE = 0.1
"""Weight of the old model in a refit, as a share of the window's."""
_KEPT_SHARE = 0.1
"""Least share of a constant that a refit keeps."""
_PREFILL_TRIED = 64
"""Joining tokens at which the old model is evaluated."""
_KNEES = 6
"""Knee positions that a refit tries, beside the old one."""


class _Counters(NamedTuple):
    """A report's totals since the incarnation started."""

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
    """A cost model that `observe` refines, if `refine` is set, and whose `error` it tracks in any case."""

    def __init__(self, start: CostModel, refine: bool = True) -> None:
        self._model = start
        self._refine = refine
        self._error: float | None = None
        self._window: deque[StepPoint] = deque(maxlen=WINDOW)
        self._since_refit = 0
        self._refit_at = FIRST_REFIT
        self._pulls: deque[tuple[float, float]] = deque(maxlen=PULLS)  # tokens rebuilt, seconds
        self._names: set[str] = set()
        self._begun: dict[str, _Counters] = {}  # first reports of open pairs
        self._reports = 0

    @property
    def model(self) -> CostModel:
        """The present constants."""
        return self._model

    @property
    def error(self) -> float | None:
        """Mean of |predicted - measured| / measured over the last observations; None before the first."""
        return self._error

    def observe(self, report: InstanceReport) -> None:
        """Take a report in. Reports of one incarnation come in order."""
        self._reports += 1
        self._names.add(report.instance)
        # Odd, so that it is not in phase with a round of 2^k instances.
        due = self._reports % (len(self._names) // OBSERVED | 1) == 0
        last = self._begun.get(report.instance)
        if last is None and not due:
            return
        now = _counters(report)
        if last is not None and last.incarnation == now.incarnation:
            if now.steps == last.steps:
                return  # the instance was idle: the pair stays open
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
    """The model refitted to these points, which need not determine all constants. Pull is kept."""
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
    # Fit again; points that the first fit cannot explain (a machine that paused) weigh less.
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
    """(pull, prefill) fitted to pulls, each (tokens rebuilt, seconds above 0).

    As for steps, the scaled old constants decide what the pulls do not show.
    """
    predicted = [model.pull + model.prefill_s(rebuilt) for rebuilt, _ in pulls]
    factor = median(seconds / max(old, 1e-12) for (_, seconds), old in zip(pulls, predicted, strict=True))
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
    """The points with `prefill` seconds subtracted per token that joined."""
    kept = [(point, point.seconds - prefill * point.prefilled) for point in points]
    return [replace(point, seconds=seconds, prefilled=0.0) for point, seconds in kept if seconds > 0]


def _asked(model: CostModel, points: Sequence[StepPoint]) -> list[StepPoint]:
    """Predictions around the points: one trajectory to twice the most, with short to long KV."""
    most = max(point.running for point in points)
    context = median(point.kv_tokens / point.running for point in points)
    asked = [
        StepPoint(running=running, kv_tokens=running * length, seconds=0.0, prefilled=prefilled)
        for running in (1.0, most / 2, most, 2 * most)
        for length in (0.0, context, 4 * context)
        for prefilled in (0.0, _PREFILL_TRIED)
    ]
    weight = _PRIOR_SHARE * len(points) / len(asked)
    predicted = [replace(point, seconds=predicted_s(model, point), weight=weight) for point in asked]
    return [point for point in predicted if point.seconds > 0]


def _spread(values: set[float], most: int) -> list[float]:
    """At most `most` of the values, evenly spaced by rank."""
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
