"""Learning curves of finished runs, and bands over their seeds.

Invariants: only what a run wrote itself is used, and only of a run that ended by itself; a run that ended
early (it only filtered) keeps its last accuracy, so that no collapse drops out of a band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from staleflow.audit import audit_ledger
from staleflow.errors import RunFailed
from staleflow.reporting.load import RunData, load_run
from staleflow.storage.journal import read_journal

Curve = Mapping[int, float]
"""Values by training step, or by weight version."""
DONE = ("completed", "filtered_out")
"""Reasons of an end that more time would not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """One run."""

    folder: Path
    bound: int
    rate: float
    """Learning rate after the warm-up."""
    seed: int
    steps: int
    reason: str
    accuracy: Curve
    """Sampled, on the held-out prompts, by weight version."""
    reward: Curve
    """Mean over everything scored during a step, filtered groups included."""
    staleness: Curve
    """Mean over the trajectories trained on in a step."""
    worst_staleness: int
    filtered: float
    """Groups filtered for each one trained on."""
    violations: int
    """What the audit found."""
    attempts: int
    """1, and 1 for each time that it was resumed."""

    @property
    def start(self) -> float:
        """Accuracy of the initial weights."""
        return self.accuracy[min(self.accuracy)]

    @property
    def end(self) -> float:
        """Accuracy of the last weights."""
        return self.accuracy[max(self.accuracy)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Median, least and most over seeds, one of each for every x."""

    xs: tuple[int, ...]
    median: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSetting:
    """The runs of one bound and one learning rate, one for each seed."""

    bound: int
    rate: float
    runs: tuple[RunCurves, ...]

    @property
    def accuracy(self) -> Band:
        """Over weight versions."""
        versions = sorted({version for run in self.runs for version in run.accuracy})
        return band([_held(run.accuracy, versions) for run in self.runs])

    @property
    def start(self) -> float:
        """Median accuracy of the initial weights."""
        return median(run.start for run in self.runs)

    @property
    def end(self) -> float:
        """Median accuracy of the last weights."""
        return median(run.end for run in self.runs)

    def staleness(self, first: int, last: int) -> float | None:
        """Mean over the steps `first` to `last`, both included, of all runs; None where none got there."""
        values = [v for run in self.runs for step, v in run.staleness.items() if first <= step <= last]
        return fmean(values) if values else None


def read_run(folder: Path) -> RunCurves:
    """Raises RunFailed for a run that did not end by itself, or was not evaluated."""
    run = load_run(folder)
    audit = audit_ledger(folder)
    reason = str(run.summary.get("run/reason", "killed, or still going"))
    accuracy = _curve(run.evals, "eval/weight_version", "eval/heldout/avg@1")
    if reason not in DONE or not accuracy or not run.train:
        raise RunFailed(f"{folder} is of no use here: it ended with {reason!r} and {len(run.train)} steps")
    groups = sum(row["rollout/groups"] for row in run.train)
    return RunCurves(
        folder=folder,
        bound=run.config["staleness"]["bound"],
        rate=float(run.config["training"]["learning_rate"]),
        seed=run.config["run"]["seed"],
        steps=len(run.train),
        reason=reason,
        accuracy=accuracy,
        reward=_rewards(run),
        staleness=_curve(run.train, "train/step", "staleness/mean"),
        worst_staleness=max(int(row["staleness/max"]) for row in run.train),
        filtered=sum(row["rollout/filtered_groups"] for row in run.train) / groups,
        violations=len(audit.violations),
        attempts=audit.attempts,
    )


def settings(runs: Iterable[RunCurves]) -> tuple[CurveSetting, ...]:
    """Runs that differ in their seed alone, together; by learning rate, then by bound."""
    found: dict[tuple[float, int], list[RunCurves]] = {}
    for run in runs:
        found.setdefault((run.rate, run.bound), []).append(run)
    return tuple(
        CurveSetting(bound=bound, rate=rate, runs=tuple(sorted(members, key=lambda run: run.seed)))
        for (rate, bound), members in sorted(found.items())
    )


def band(curves: Sequence[Curve]) -> Band:
    """Over whatever curves have a value at an x."""
    xs = sorted({x for curve in curves for x in curve})
    columns = [[curve[x] for curve in curves if x in curve] for x in xs]
    return Band(
        xs=tuple(xs),
        median=tuple(map(median, columns)),
        least=tuple(map(min, columns)),
        most=tuple(map(max, columns)),
    )


def smoothed(curve: Curve, window: int) -> dict[int, float]:
    """At each x, the mean of the last `window` values up to it; at the beginning of as many as there are."""
    xs = sorted(curve)
    return {x: fmean(curve[at] for at in xs[max(0, i + 1 - window) : i + 1]) for i, x in enumerate(xs)}


def _held(curve: Curve, xs: Sequence[int]) -> Curve:
    """The curve, its last value held to the end of `xs`."""
    last = max(curve)
    return {**curve, **{x: curve[last] for x in xs if x > last}}


def _curve(rows: Iterable[Mapping[str, float]], x: str, y: str) -> dict[int, float]:
    return {int(row[x]): row[y] for row in rows if x in row and y in row}


def _rewards(run: RunData) -> dict[int, float]:
    """Mean raw reward of what was scored since the step before; from the journal, which knows the filtered.

    A step that a resume trained again has what was scored for it the second time.
    """
    rewards: dict[int, float] = {}
    total, count = 0.0, 0
    for line in read_journal(run.folder / "journal.jsonl"):
        match line["k"]:
            case "begin":
                total, count = 0.0, 0
            case "score":
                total, count = total + line["raw"], count + 1
            case "trained":
                if count:
                    rewards[line["step"]] = total / count
                total, count = 0.0, 0
    return rewards
