"""Response lengths of what was sampled beside those of what was trained on: where they differ, the choice of
what is kept favours short or long responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from staleflow.reporting.load import RunData

Kind = Literal["sampled", "trained"]


def length_counts(runs: Iterable[RunData], kind: Kind) -> Counter[int]:
    """Return trajectories by bucket: bucket b holds lengths from b to 2 b - 1, bucket 0 those of 0."""
    counts: Counter[int] = Counter()
    prefix = f"lengths/{kind}/"
    for run in runs:
        for row in run.train:
            for key, count in row.items():
                if key.startswith(prefix) and key.removeprefix(prefix).isdigit():
                    counts[int(key.removeprefix(prefix))] += int(count)
    return counts


def mean_lengths(run: RunData) -> tuple[float | None, float | None]:
    """Return the mean tokens of a sampled and of a trained response; None where they were not recorded."""
    trained = _mean(run, "trained")
    if trained is None:
        tokens = [t.tokens for t in run.trained if t.tokens]
        trained = sum(tokens) / len(tokens) if tokens else None
    return _mean(run, "sampled"), trained


def _mean(run: RunData, kind: Kind) -> float | None:
    number = tokens = 0.0
    for row in run.train:
        mean = row.get(f"lengths/{kind}/mean")
        if isinstance(mean, int | float):
            prefix = f"lengths/{kind}/"
            here = sum(v for k, v in row.items() if k.startswith(prefix) and k.removeprefix(prefix).isdigit())
            number += here
            tokens += mean * here
    return tokens / number if number else None
