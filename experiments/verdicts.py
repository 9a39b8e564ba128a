"""What runs under several staleness bounds say about a statement on convergence.

The rules are on medians over seeds of sampled held-out accuracy, and are stated on the page:

- a bound *collapses* when accuracy falls below COLLAPSED of where it began, at any evaluation;
- else it is *like synchronous* when it ends no more than MARGIN below where η = 0 ends;
- else it *falls behind*.

Nothing can be said of a learning rate at which synchronous training itself gains less than MARGIN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from staleflow.experiments.curves import CurveSetting

MARGIN = 0.05
"""Accuracy. About what one evaluation on a hundred prompts is off by."""
COLLAPSED = 0.5
"""Half of what the initial weights could do is lost: no dip that noise would explain."""

Outcome = Literal["like synchronous", "falls behind", "collapses"]
Verdict = Literal["agrees", "disagrees", "cannot be said"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What the paper says of some bounds."""

    text: str
    bounds: tuple[int, ...]
    expected: Outcome


PAPER = (
    Statement(
        text="η up to 3 converges like synchronous training", bounds=(1, 2, 3), expected="like synchronous"
    ),
    Statement(text="η = 10 collapses", bounds=(10,), expected="collapses"),
)
"""arXiv 2601.12784."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the runs of one learning rate say of one statement."""

    statement: Statement
    rate: float
    verdict: Verdict
    reason: str


def collapsed(accuracies: Iterable[float], start: float) -> bool:
    """Whether accuracy was, at any evaluation, below COLLAPSED of where it began."""
    return min(accuracies) < COLLAPSED * start


def outcome(setting: CurveSetting, synchronous: CurveSetting) -> Outcome:
    """See the module."""
    if collapsed(setting.accuracy.median, setting.start):
        return "collapses"
    return "like synchronous" if setting.end >= synchronous.end - MARGIN else "falls behind"


def judge(statement: Statement, by_bound: Mapping[int, CurveSetting]) -> Judgement:
    """`by_bound`: settings of one learning rate, that of η = 0 among them."""
    synchronous = by_bound[0]
    verdict, reason = _verdict(statement, by_bound, synchronous)
    return Judgement(statement=statement, rate=synchronous.rate, verdict=verdict, reason=reason)


def _verdict(
    statement: Statement, by_bound: Mapping[int, CurveSetting], synchronous: CurveSetting
) -> tuple[Verdict, str]:
    if synchronous.end < synchronous.start + MARGIN:
        learned = f"{synchronous.start:.2f} to {synchronous.end:.2f}"
        return "cannot be said", f"η = 0 itself learns too little: {learned}"
    known = [by_bound[bound] for bound in statement.bounds if bound in by_bound]
    if not known:
        return "cannot be said", "there is no such run"
    against = [s for s in known if outcome(s, synchronous) != statement.expected]
    told = "; ".join(_told(s, synchronous) for s in (against or known))
    return ("disagrees" if against else "agrees"), f"{told}; η = 0 ends at {synchronous.end:.2f}"


def _told(setting: CurveSetting, synchronous: CurveSetting) -> str:
    curve = setting.accuracy
    match outcome(setting, synchronous):
        case "like synchronous":
            return f"η = {setting.bound} ends at {setting.end:.2f}"
        case "falls behind":
            return f"η = {setting.bound} falls behind and ends at {setting.end:.2f}"
        case "collapses":
            lowest = min(curve.median)
            version = curve.xs[curve.median.index(lowest)]
            return (
                f"η = {setting.bound} collapses: {setting.start:.2f} at first, {lowest:.2f} after {version} "
                f"steps, {setting.end:.2f} in the end"
            )
