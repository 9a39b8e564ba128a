"""The numbers that a report opens with, each measured, or None where the run did not measure it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.load import RunData, Values, series

ABSENT = "–"  # noqa: RUF001
"""What stands where nothing was measured or set."""

TOKEN_FATES = ("trained", "filtered", "aborted", "discarded", "in_flight")
"""Where a generated token can be; they sum to `generated`."""

WORTH_NAMING = 0.15
"""A side that stands still for less than this share of the time is no bottleneck worth naming."""
TAKING_TURNS = 0.30
"""Where both sides stand still for at least this share, neither is slow: they wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBalance:
    """Generated tokens and where they are now."""

    generated: int
    fates: Mapping[str, int]

    @property
    def missing(self) -> int:
        """Generated tokens that nothing accounts for; negative where too many are accounted for."""
        return self.generated - sum(self.fates.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One run in a dozen numbers."""

    policy: str | None
    bound: int | None
    steps: int
    planned: int | None
    seconds: float | None
    """Wall time of all attempts that the rows cover."""
    tokens_per_s: float | None
    """Trained tokens per second of wall time."""
    staleness_mean: float | None
    staleness_max: int | None
    first_accuracy: float | None
    last_accuracy: float | None
    first_version: int | None
    last_version: int | None
    trainer_waiting: float | None
    """Share of the wall time for which the trainer waited for a batch, 0 to 1."""
    instances_idle: float | None
    """Share of instance time with nothing running, 0 to 1."""
    tokens: TokenBalance | None
    reason: str
    """Why the run ended; `still going or killed` without a summary row."""


def headline(run: RunData) -> Headline:
    """Measure one run."""
    seconds = _wall_seconds(run)
    tokens = _tokens(run)
    # From the ledger first: it spans all attempts, as the wall time does.
    trained = sum(t.tokens for t in run.trained) or (tokens.fates["trained"] if tokens else 0)
    accuracy_key = accuracy_name(run)
    versions, accuracies = (
        series(run.evals, "eval/weight_version", accuracy_key) if accuracy_key else ([], [])
    )
    mean, worst = _staleness(run)
    planned = _at(run.config, "run", "steps")
    return Headline(
        policy=_at(run.config, "coordination", "policy"),
        bound=_at(run.config, "staleness", "bound"),
        steps=len(run.train) or len({t.step for t in run.trained}),
        planned=planned if isinstance(planned, int) else None,
        seconds=seconds,
        tokens_per_s=trained / seconds if seconds and trained else None,
        staleness_mean=mean,
        staleness_max=worst,
        first_accuracy=accuracies[0] if accuracies else None,
        last_accuracy=accuracies[-1] if accuracies else None,
        first_version=int(versions[0]) if versions else None,
        last_version=int(versions[-1]) if versions else None,
        trainer_waiting=_trainer_waiting(run, seconds),
        instances_idle=idle_share(run),
        tokens=tokens,
        reason=str(run.summary.get("run/reason", "finished" if run.summary else "still going or killed")),
    )


def accuracy_name(run: RunData) -> str | None:
    """Return the metric of sampled accuracy: `eval/heldout/avg@1`, else the first sampled one there is."""
    names = sorted({key for row in run.evals for key in row if key.startswith("eval/") and "/avg@" in key})
    sampled = [name for name in names if "greedy" not in name]
    if "eval/heldout/avg@1" in sampled:
        return "eval/heldout/avg@1"
    return sampled[0] if sampled else None


def instance_names(run: RunData) -> list[str]:
    """Return the ids of all instances ever sampled, numbers in the order of numbers."""
    ids = {key.split("/")[1] for row in run.instances for key in row if key.startswith("instance/")}
    return sorted(ids, key=lambda name: [(len(part), part) for part in re.split(r"(\d+)", name)])


def idle_share(run: RunData, instance: str | None = None) -> float | None:
    """Share of samples with nothing running, of one instance or of all of them; None without samples."""
    names = instance_names(run) if instance is None else [instance]
    running = [
        row[f"instance/{n}/running"] for row in run.instances for n in names if f"instance/{n}/running" in row
    ]
    return sum(1 for r in running if r == 0) / len(running) if running else None


def mean_timings(run: RunData) -> dict[str, float]:
    """Return the mean seconds per step of every `timing_s/...` metric, without its prefix."""
    names = sorted({key for row in run.train for key in row if key.startswith("timing_s/")})
    means = {}
    for name in names:
        _, values = series(run.train, "train/step", name)
        if values:
            means[name.removeprefix("timing_s/")] = sum(values) / len(values)
    return means


def bottleneck(numbers: Headline) -> str:
    """Say in one line which side held the run up, from measured waiting only."""
    waiting, idle = numbers.trainer_waiting, numbers.instances_idle
    if waiting is None or idle is None:
        return "bottleneck unknown: the run has no samples of both the trainer's and the instances' waiting"
    trainer, instances = f"the trainer waited {waiting:.0%} of the time", f"the instances idled {idle:.0%}"
    if min(waiting, idle) >= TAKING_TURNS:
        return f"taking turns: {trainer} and {instances}, so each side stood waiting for the other"
    if max(waiting, idle) < WORTH_NAMING:
        return f"balanced: {trainer} and {instances}"
    if waiting >= idle:
        return f"rollout-bound: {trainer}, {instances}"
    return f"train-bound: {instances} of the time, {trainer.removesuffix(' of the time')}"


def config_differences(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Return the dotted keys whose values differ between runs, each with one text a run.

    The names of the runs, which always differ, are left out; ABSENT stands where a key is not set.
    """
    flat = [_flatten(run.config) for run in runs]
    keys = sorted({key for values in flat for key in values})
    table = {key: [values.get(key, ABSENT) for values in flat] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1 and key != "run.name"}


def _wall_seconds(run: RunData) -> float | None:
    rows = (*run.train, *run.evals, *run.instances, run.summary)
    return max((float(row["run/seconds"]) for row in rows if "run/seconds" in row), default=None)


def _tokens(run: RunData) -> TokenBalance | None:
    source: Values = (
        run.summary if "tokens/generated" in run.summary else (run.train[-1] if run.train else {})
    )
    if "tokens/generated" not in source:
        return None
    return TokenBalance(
        generated=int(source["tokens/generated"]),
        fates={fate: int(source.get(f"tokens/{fate}", 0)) for fate in TOKEN_FATES},
    )


def _staleness(run: RunData) -> tuple[float | None, int | None]:
    """Mean and maximum over trained trajectories: from the ledger, else from the metrics."""
    if run.trained:
        lags = [t.staleness for t in run.trained]
        return sum(lags) / len(lags), max(lags)
    _, means = series(run.train, "train/step", "staleness/mean")
    _, worst = series(run.train, "train/step", "staleness/max")
    return (sum(means) / len(means) if means else None), (int(max(worst)) if worst else None)


def _trainer_waiting(run: RunData, seconds: float | None) -> float | None:
    _, waits = series(run.train, "train/step", "timing_s/wait_for_batch")
    # From the steps first: a summary row speaks of the last attempt only, the wall time of all.
    waited = sum(waits) if waits else run.summary.get("wait/trainer_s")
    return min(1.0, float(waited) / seconds) if waited is not None and seconds else None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat


def _at(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
