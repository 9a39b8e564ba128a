"""How a run spent its time, as shares from 0 to 1; None where the run did not measure it.

From the `time/...` metrics of its steps, which leave out start-up, the last evaluation and the last save, and
sum over attempts. Older runs did not record them and have coarser sources: the waiting of each step, and one
sample of the instances per second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from staleflow.reporting.load import RunData, Values, series

CAUSES = ("rollout", "longest", "reward", "pull", "routing", "environment")
"""What the trainer can wait for; `telemetry.utilization` defines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the wall time, or of the time of all instances together."""

    trainer_waiting: float | None
    waiting_for: Mapping[str, float]
    """Parts of `trainer_waiting`, by cause; empty if not recorded."""
    updating: float | None
    pushing: float | None
    idle: float | None
    """Instance time with nothing running."""
    idle_while_training: float | None
    """The part of `idle` in which the trainer worked."""
    decoding: float | None
    pulling: float | None
    """Instance time in which pulls stopped decoding."""
    commands: float | None
    """Instance time spent on the other commands: Route, Interrupt, Abort."""
    coordination: float | None
    """Wall time that Control took."""
    verifying: float | None
    """Seconds of all verifier processes per second of wall time; may exceed 1."""


def shares(run: RunData) -> TimeShares:
    """Measure one run."""
    seconds = working_seconds(run)
    recorded = total(run.train, "time/step_s")
    base = seconds if recorded is not None else wall_seconds(run)
    instances_s = total(run.train, "time/instances_s")
    idle, idle_training = _idle(run, instances_s)
    pulling = _ratio(total(run.train, "timing_s/pull"), instances_s)
    commands = [total(run.train, f"coord/{kind}_seconds") for kind in ("route", "interrupt", "abort")]
    return TimeShares(
        trainer_waiting=_trainer_waiting(run, base),
        waiting_for={
            cause: value
            for cause in CAUSES
            if (value := _ratio(total(run.train, f"time/waiting/{cause}_s"), base)) is not None
        },
        updating=_ratio(total(run.train, "timing_s/update"), base),
        pushing=_ratio(total(run.train, "timing_s/push"), base),
        idle=idle,
        idle_while_training=idle_training,
        decoding=_ratio(total(run.train, "time/decoding_s"), instances_s),
        pulling=pulling,
        commands=_ratio(sum(c for c in commands if c is not None), instances_s) if any(commands) else None,
        coordination=_ratio(total(run.train, "coord/seconds"), base),
        verifying=_ratio(total(run.train, "timing_s/reward"), base),
    )


def wall_seconds(run: RunData) -> float | None:
    """Return the time of all attempts, start and end included."""
    rows = (*run.train, *run.evals, *run.instances, run.summary)
    return max((float(row["run/seconds"]) for row in rows if "run/seconds" in row), default=None)


def working_seconds(run: RunData) -> float | None:
    """Return the time from the end of start-up to the last training step; else the wall time."""
    return total(run.train, "time/step_s") or wall_seconds(run)


def total(rows: Iterable[Values], name: str) -> float | None:
    """Return the sum of a metric over the rows that have it; None if none has."""
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return sum(values) if values else None


def instance_names(run: RunData) -> list[str]:
    """Return the ids of all sampled instances, in natural order."""
    ids = {key.split("/")[1] for row in run.instances for key in row if key.startswith("instance/")}
    return sorted(ids, key=lambda name: [(len(part), part) for part in re.split(r"(\d+)", name)])


def idle_share(run: RunData, instance: str | None = None, *, while_training: bool = False) -> float | None:
    """Share of samples with nothing running, of one instance or of all of them; None without samples.

    `while_training`: the share of samples with nothing running and the trainer at work.
    """
    names = instance_names(run) if instance is None else [instance]
    samples = [
        row[f"instance/{n}/running"] == 0 and (not while_training or bool(row.get("trainer/busy")))
        for row in run.instances
        for n in names
        if f"instance/{n}/running" in row
    ]
    return sum(samples) / len(samples) if samples else None


def _idle(run: RunData, instances_s: float | None) -> tuple[float | None, float | None]:
    """Idle share, and the part of it while the trainer worked."""
    idle = _ratio(total(run.train, "time/instances_idle_s"), instances_s)
    if idle is None:
        return idle_share(run), idle_share(run, while_training=True)
    during = _ratio(total(run.train, "time/instances_idle_training_s"), instances_s) or 0.0
    # What an instance did between two reports is known only from the totals in the later one.
    worked = [total(run.train, name) or 0.0 for name in ("time/decoding_s", "timing_s/pull")]
    most = max(0.0, 1 - sum(worked) / instances_s) if instances_s else 1.0
    return (idle, during) if idle <= most else (most, during * most / idle)


def _trainer_waiting(run: RunData, seconds: float | None) -> float | None:
    waited = total(run.train, "time/trainer_waiting_s")
    if waited is None:
        _, waits = series(run.train, "train/step", "timing_s/wait_for_batch")
        # The steps are preferred: a summary row covers the last attempt only, the wall time all attempts.
        waited = sum(waits) if waits else run.summary.get("wait/trainer_s")
    share = _ratio(waited, seconds)
    return None if share is None else min(1.0, share)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return float(part) / whole if part is not None and whole else None
