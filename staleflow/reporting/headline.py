"""The numbers that a report opens with, each measured, or None where the run did not measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.length_bias import mean_lengths
from staleflow.reporting.load import RunData, Values, series
from staleflow.reporting.utilization import Shares, shares, total, wall_seconds, working_seconds

ABSENT = "–"  # noqa: RUF001
"""What stands where nothing was measured or set."""

TOKEN_FATES = ("trained", "filtered", "aborted", "discarded", "in_flight")
"""Where a generated token can be; they sum to `generated`."""

COUNTS = {
    "pulls": "coord/pull_count",
    "interrupts": "coord/interrupt_count",
    "migrations": "coord/migrate_count",
    "preemptions": "rollout/preemptions",
    "groups_filtered": "rollout/filtered_groups",
    "groups_failed": "rollout/failed_groups",
    "groups_expired": "rollout/expired_groups",
    "members_aborted": "rollout/surplus_members",
    "stragglers_retried": "rollout/straggler_retried",
    "stragglers_cut": "rollout/straggler_truncated",
}
"""What is counted over a run, and the figure of a step that holds it. Migrations are interrupts, too."""


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
    """Trained tokens per second of `working_seconds`."""
    generated_per_s: float | None
    steps_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    first_accuracy: float | None
    last_accuracy: float | None
    first_version: int | None
    last_version: int | None
    shares: Shares
    counts: Mapping[str, int]
    """Of COUNTS, those that the run recorded."""
    lengths: tuple[float | None, float | None]
    """Mean response length of all that was sampled to its end, and of what was trained on."""
    tokens: TokenBalance | None
    reason: str
    """Why the run ended; `still going or killed` without a summary row."""


def headline(run: RunData) -> Headline:
    """Measure one run."""
    seconds = working_seconds(run)
    tokens = _tokens(run)
    steps = len(run.train) or len({t.step for t in run.trained})
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
            name: round(count) for name, key in COUNTS.items() if (count := total(run.train, key)) is not None
        },
        lengths=mean_lengths(run),
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


def mean_timings(run: RunData) -> dict[str, float]:
    """Return the mean seconds per step of every `timing_s/...` metric, without its prefix."""
    names = sorted({key for row in run.train for key in row if key.startswith("timing_s/")})
    means = {}
    for name in names:
        _, values = series(run.train, "train/step", name)
        if values:
            means[name.removeprefix("timing_s/")] = sum(values) / len(values)
    return means


def _generated(run: RunData, tokens: TokenBalance) -> float:
    """Generated tokens of all attempts: their steps' rates over their times."""
    steps = [
        row["rollout/tokens_per_s"] * row["time/step_s"]
        for row in run.train
        if "rollout/tokens_per_s" in row and "time/step_s" in row
    ]
    return sum(steps) if len(steps) == len(run.train) > 0 else float(tokens.generated)


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


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted keys and their values as text."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flat_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat


def _at(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
