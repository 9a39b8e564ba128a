"""A real run beside its simulation: the same figures of both, and how far they are apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from staleflow.experiments.study import Finding, Table
from staleflow.reporting.headline import headline
from staleflow.reporting.load import RunData
from staleflow.reporting.utilization import CAUSES, working_seconds
from staleflow.telemetry.catalogue import summarize

THROUGHPUT_GOAL = 0.15
"""Largest deviation of the simulated throughput."""
STALENESS_GOAL = 0.15
"""Largest total variation distance of the distributions of staleness."""
SKIPPED = 3
"""Steps left out at the start and at the end of the trimmed throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A real run beside its simulation."""

    name: str
    real: RunData
    simulated: RunData
    notes: tuple[str, ...] = ()

    def findings(self, *, judged: bool) -> tuple[Finding, ...]:
        """Throughput and staleness, with their goals."""
        rates = [throughput(run) for run in (self.real, self.simulated)]
        trimmed = [throughput(run, skip=SKIPPED) for run in (self.real, self.simulated)]
        return (
            Finding(
                name=f"{self.name}: throughput, deviation of the simulation",
                value=100 * deviation(*rates),
                unit="%",
                goal=100 * THROUGHPUT_GOAL if judged else None,
                note=f"{rates[0]:,.0f} trained tokens/s in the real run, {rates[1]:,.0f} simulated",
            ),
            Finding(
                name=f"{self.name}: the same without {SKIPPED} steps at either end",
                value=100 * deviation(*trimmed),
                unit="%",
                note=f"{trimmed[0]:,.0f} and {trimmed[1]:,.0f} trained tokens/s",
            ),
            Finding(
                name=f"{self.name}: staleness, total variation distance",
                value=total_variation(staleness(self.real), staleness(self.simulated)),
                unit="",
                goal=STALENESS_GOAL if judged else None,
                note="of the trained trajectories, from the ledgers",
            ),
        )

    def table(self) -> Table:
        """The same figures of both."""
        rows = []
        for title, measure in FIGURES:
            values = [measure(run) for run in (self.real, self.simulated)]
            ratio = values[1] / values[0] if values[0] else math.nan
            rows.append((title, *values, ratio if math.isfinite(ratio) else ""))
        return Table(
            title=f"{self.name}: real and simulated",
            columns=("figure", "real", "simulated", "simulated / real"),
            rows=tuple(rows),
        )

    def explanation(self) -> str:
        """Where the seconds of a step differ most."""
        real, simulated = step_parts(self.real), step_parts(self.simulated)
        differences = {part: simulated[part] - real[part] for part in real}
        whole = sum(simulated.values()) - sum(real.values())
        part = max(differences, key=lambda name: abs(differences[name]))
        speeds = [decode_speed(run) for run in (self.real, self.simulated)]
        return (
            f"{self.name}: a simulated step takes {whole:+.2f} s of {sum(real.values()):.2f} s; the largest "
            f"part of that is {part} ({differences[part]:+.2f} s). An instance at work decoded "
            f"{speeds[0]:,.0f} tokens/s in the real run and {speeds[1]:,.0f} in the simulated one."
        )


def deviation(real: float, simulated: float) -> float:
    """Of the simulated figure, as a share of the real one."""
    return abs(simulated / real - 1) if real else math.inf


def total_variation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Half the sum of the differences of two distributions (shares by value): 0 the same, 1 disjoint."""
    return sum(abs(one.get(v, 0.0) - other.get(v, 0.0)) for v in {*one, *other}) / 2


def staleness(run: RunData) -> dict[int, float]:
    """Shares of the trained trajectories by staleness."""
    counts = Counter(t.staleness for t in run.trained)
    return {lag: count / len(run.trained) for lag, count in sorted(counts.items())}


def throughput(run: RunData, *, skip: int = 0) -> float:
    """Trained tokens per second, from when all parts were up, or between two steps."""
    if skip == 0 or len(run.train) <= 2 * skip:
        return headline(run).tokens_per_s or 0.0
    rows = run.train[skip - 1 : len(run.train) - skip]
    first, last = rows[0]["train/step"], rows[-1]["train/step"]
    tokens = sum(t.tokens for t in run.trained if first < t.step <= last)
    seconds = sum(row["time/step_s"] for row in rows[1:])
    return tokens / seconds if seconds else 0.0


def step_parts(run: RunData) -> dict[str, float]:
    """Mean seconds of a step, by what they went to."""
    steps = max(1, len(run.train))
    seconds = {
        f"waiting ({cause})": (summarize(f"time/waiting/{cause}_s", run.train) or 0.0) / steps
        for cause in CAUSES
    }
    whole = (working_seconds(run) or 0.0) / steps
    # A simulated update has the batch's way to the trainer in it, and that of the answer.
    return seconds | {"the trainer, with the way there and back": max(0.0, whole - sum(seconds.values()))}


def decode_speed(run: RunData) -> float:
    """Generated tokens per second of decoding on one instance."""
    tokens, seconds = run.summary.get("tokens/generated", 0), summarize("time/decoding_s", run.train)
    return tokens / seconds if seconds else 0.0


Measure = Callable[[RunData], float]


def _mean_of(name: str) -> Measure:
    return lambda run: (summarize(name, run.train) or 0.0) / max(1, len(run.train))


def _share_of(name: str) -> Measure:
    return lambda run: getattr(headline(run).shares, name) or 0.0


def _sum_of(name: str) -> Measure:
    return lambda run: summarize(name, run.train) or 0.0


FIGURES: tuple[tuple[str, Measure], ...] = (
    ("trained tokens/s", throughput),
    ("generated tokens/s", lambda run: headline(run).generated_per_s or 0.0),
    ("seconds of a step", lambda run: (working_seconds(run) or 0.0) / max(1, len(run.train))),
    ("… of it update", _mean_of("timing_s/update")),
    ("… of it push", _mean_of("timing_s/push")),
    ("… of it waiting for a batch", _mean_of("time/trainer_waiting_s")),
    ("tokens/s of an instance at work", decode_speed),
    ("instances idle, share", _share_of("idle")),
    ("decoding, share", _share_of("decoding")),
    ("pulling, share", _share_of("pulling")),
    ("staleness, mean", lambda run: headline(run).staleness_mean or 0.0),
    ("pulls", _sum_of("coord/pull_count")),
    ("interrupts", _sum_of("coord/interrupt_count")),
    ("preemptions", _sum_of("rollout/preemptions")),
    ("mean length of a trained response", lambda run: headline(run).lengths[1] or 0.0),
)


def staleness_table(comparisons: Sequence[Comparison]) -> Table:
    """The distributions side by side."""
    rows: list[tuple[str | float, ...]] = []
    for comparison in comparisons:
        for kind, run in (("real", comparison.real), ("simulated", comparison.simulated)):
            shares = staleness(run)
            rows.append((f"{comparison.name}, {kind}", *(shares.get(lag, 0.0) for lag in range(3))))
    return Table(
        title="Shares of trained trajectories by staleness",
        columns=("run", "0", "1", "2"),
        rows=tuple(rows),
    )


def at_the_bound(comparison: Comparison) -> str:
    """How much the distance of the two distributions can say."""
    shares = [staleness(run).get(run.bound or 0, 0.0) for run in (comparison.real, comparison.simulated)]
    return (
        f"{comparison.name}: {shares[0]:.0%} of the real and {shares[1]:.0%} of the simulated trajectories "
        "were as stale as the bound allows; the larger that share, the less the distance of the two says."
    )
