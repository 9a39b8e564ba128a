"""What the metrics of a run say over all its steps; None where the run did not measure it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from staleflow.reporting.load import RunData, Values, series, setting
from staleflow.reporting.utilization import TimeShares, shares, wall_seconds, working_seconds
from staleflow.telemetry.catalogue import CATALOGUE, summarize

TOKEN_FATES = ("trained", "filtered", "aborted", "discarded", "in_flight")
"""What can become of a generated token; they sum to `generated`."""

COUNTS = {metric.figure: metric.name for metric in CATALOGUE.values() if metric.figure}
"""Counts over a run, and the metric of a step that each sums up: what the catalogue gives a figure."""


Kind = Literal["sampled", "trained"]
"""Which response lengths: of all responses that were generated to their end, or of those trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFates:
    """Generated tokens and what became of them."""

    generated: int
    fates: Mapping[str, int]

    @property
    def missing(self) -> int:
        """Generated tokens without a fate; negative if there are more fates than tokens."""
        return self.generated - sum(self.fates.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One run in numbers."""

    policy: str | None
    bound: int | None
    steps: int
    planned: int | None
    seconds: float | None
    """Wall time of all attempts."""
    tokens_per_s: float | None
    """Trained tokens per second of `working_seconds`."""
    generated_per_s: float | None
    steps_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    first_accuracy: float | None
    last_accuracy: float | None
    first_version: int | None
    last_version: int | None
    shares: TimeShares
    counts: Mapping[str, int]
    """Those of COUNTS that the run recorded."""
    lengths: tuple[float | None, float | None]
    """Mean response length of sampled and of trained trajectories."""
    tokens: TokenFates | None
    reason: str
    """Why the run ended; `running or killed` without a summary row."""


def headline(run: RunData) -> Headline:
    """Measure one run."""
    seconds = working_seconds(run)
    tokens = _tokens(run)
    steps = len(run.train) or len({t.step for t in run.trained})
    # The ledger is preferred: like the wall time, it spans all attempts.
    trained = sum(t.tokens for t in run.trained) or (tokens.fates["trained"] if tokens else 0)
    accuracy_key = accuracy_name(run)
    versions, accuracies = (
        series(run.evals, "eval/weight_version", accuracy_key) if accuracy_key else ([], [])
    )
    mean, worst = _staleness(run)
    planned = setting(run.config, "run", "steps")
    return Headline(
        policy=setting(run.config, "coordination", "policy"),
        bound=run.bound,
        steps=steps,
        planned=planned if isinstance(planned, int) else None,
        seconds=wall_seconds(run),
        tokens_per_s=trained / seconds if seconds and trained else None,
        generated_per_s=_generated(run, tokens) / seconds if seconds and tokens else None,
        steps_per_s=steps / seconds if seconds and steps else None,
        staleness_mean=mean,
        staleness_max=worst,
        first_accuracy=accuracies[0] if accuracies else None,
        last_accuracy=accuracies[-1] if accuracies else None,
        first_version=int(versions[0]) if versions else None,
        last_version=int(versions[-1]) if versions else None,
        shares=shares(run),
        counts={
            figure: round(count)
            for figure, name in COUNTS.items()
            if (count := summarize(name, run.train)) is not None
        },
        lengths=mean_lengths(run),
        tokens=tokens,
        reason=str(run.summary.get("run/reason", "finished" if run.summary else "running or killed")),
    )


def accuracy_name(run: RunData) -> str | None:
    """Return the metric of sampled accuracy: `eval/heldout/avg@1`, else the first sampled one."""
    names = sorted({key for row in run.evals for key in row if key.startswith("eval/") and "/avg@" in key})
    sampled = [name for name in names if "greedy" not in name]
    if "eval/heldout/avg@1" in sampled:
        return "eval/heldout/avg@1"
    return sampled[0] if sampled else None


def mean_timings(run: RunData) -> dict[str, float]:
    """Return the mean seconds per step of every `timing_s/...` metric, without its prefix."""
    names = sorted({key for row in run.train for key in row if key.startswith("timing_s/")})
    means = {}
    for name in names:
        _, values = series(run.train, "train/step", name)
        if values:
            means[name.removeprefix("timing_s/")] = sum(values) / len(values)
    return means


def length_counts(runs: Iterable[RunData], kind: Kind) -> Counter[int]:
    """Return trajectories by bucket: bucket b holds lengths from b to 2 b - 1, bucket 0 length 0."""
    counts: Counter[int] = Counter()
    prefix = f"lengths/{kind}/"
    for run in runs:
        for row in run.train:
            for key, count in row.items():
                if key.startswith(prefix) and key.removeprefix(prefix).isdigit():
                    counts[int(key.removeprefix(prefix))] += int(count)
    return counts


def mean_lengths(run: RunData) -> tuple[float | None, float | None]:
    """Return the mean tokens of a sampled and of a trained response; None if not recorded."""
    trained = _mean_length(run, "trained")
    if trained is None:
        tokens = [t.tokens for t in run.trained if t.tokens]
        trained = sum(tokens) / len(tokens) if tokens else None
    return _mean_length(run, "sampled"), trained


def _mean_length(run: RunData, kind: Kind) -> float | None:
    number = tokens = 0.0
    for row in run.train:
        mean = row.get(f"lengths/{kind}/mean")
        if isinstance(mean, int | float):
            prefix = f"lengths/{kind}/"
            here = sum(v for k, v in row.items() if k.startswith(prefix) and k.removeprefix(prefix).isdigit())
            number += here
            tokens += mean * here
    return tokens / number if number else None


def _generated(run: RunData, tokens: TokenFates) -> float:
    """Generated tokens of all attempts: each step's rate times its duration."""
    steps = [
        row["rollout/tokens_per_s"] * row["time/step_s"]
        for row in run.train
        if "rollout/tokens_per_s" in row and "time/step_s" in row
    ]
    return sum(steps) if len(steps) == len(run.train) > 0 else float(tokens.generated)


def _tokens(run: RunData) -> TokenFates | None:
    source: Values = (
        run.summary if "tokens/generated" in run.summary else (run.train[-1] if run.train else {})
    )
    if "tokens/generated" not in source:
        return None
    return TokenFates(
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


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted keys and their values as text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flat_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat
