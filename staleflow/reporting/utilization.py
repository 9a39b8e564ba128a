"""How a run spent its time, as shares from 0 to 1; None where the run did not measure it.

From the `time/...` metrics of its steps, which leave out start-up, the last evaluation and the last save, and
sum over attempts. Older runs did not record them and have coarser sources: the waiting of each step, and one
sample of the instances per second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from staleflow.reporting.load import RunData, series
from staleflow.telemetry.catalogue import summarize

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
    recorded = summarize("time/step_s", run.train)
    base = seconds if recorded is not None else wall_seconds(run)
    instances_s = summarize("time/instances_s", run.train)
    idle, idle_training = _idle(run, instances_s)
    pulling = _ratio(summarize("timing_s/pull", run.train), instances_s)
    commands = [summarize(f"coord/{kind}_seconds", run.train) for kind in ("route", "interrupt", "abort")]
    return TimeShares(
        trainer_waiting=_trainer_waiting(run, base),
        waiting_for={
            cause: value
            for cause in CAUSES
            if (value := _ratio(summarize(f"time/waiting/{cause}_s", run.train), base)) is not None
        },
        updating=_ratio(summarize("timing_s/update", run.train), base),
        pushing=_ratio(summarize("timing_s/push", run.train), base),
        idle=idle,
        idle_while_training=idle_training,
        decoding=_ratio(summarize("time/decoding_s", run.train), instances_s),
        pulling=pulling,
        commands=_ratio(sum(c for c in commands if c is not None), instances_s) if any(commands) else None,
        coordination=_ratio(summarize("coord/seconds", run.train), base),
        verifying=_ratio(summarize("timing_s/reward", run.train), base),
    )


def wall_seconds(run: RunData) -> float | None:
    """Return the time of all attempts, start and end included."""
    rows = (*run.train, *run.evals, *run.instances, run.summary)
    return max((float(row["run/seconds"]) for row in rows if "run/seconds" in row), default=None)


def working_seconds(run: RunData) -> float | None:
    """Return the time from the end of start-up to the last training step; else the wall time."""
    return summarize("time/step_s", run.train) or wall_seconds(run)


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
    idle = _ratio(summarize("time/instances_idle_s", run.train), instances_s)
    if idle is None:
        return idle_share(run), idle_share(run, while_training=True)
    during = _ratio(summarize("time/instances_idle_training_s", run.train), instances_s) or 0.0
    # What an instance did between two reports is known only from the totals in the later one.
    worked = [summarize(name, run.train) or 0.0 for name in ("time/decoding_s", "timing_s/pull")]
    most = max(0.0, 1 - sum(worked) / instances_s) if instances_s else 1.0
    return (idle, during) if idle <= most else (most, during * most / idle)


def _trainer_waiting(run: RunData, seconds: float | None) -> float | None:
    waited = summarize("time/trainer_waiting_s", run.train)
    if waited is None:
        _, waits = series(run.train, "train/step", "timing_s/wait_for_batch")
        # The steps are preferred: a summary row covers the last attempt only, the wall time all attempts.
        waited = sum(waits) if waits else run.summary.get("wait/trainer_s")
    share = _ratio(waited, seconds)
    return None if share is None else min(1.0, share)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return float(part) / whole if part is not None and whole else None
