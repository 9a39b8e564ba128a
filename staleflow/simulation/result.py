"""The result of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step. Times in seconds from the start of the run."""

    step: int
    began: float
    """When the trainer got the batch."""
    ended: float
    """When the trainer could take the next batch."""
    waited: float
    """Idle time of the trainer before the step."""
    tokens: int
    """Generated tokens trained on."""
    trajectories: int
    staleness_mean: float
    """Mean of step - V_traj over its trajectories."""
    staleness_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One instance, all its incarnations together. Times in seconds."""

    instance: str
    up: float
    busy: float
    """Decoding, prefill included."""
    prefill: float
    """Part of `busy`."""
    pulling: float
    generated: int
    pulls: int
    preemptions: int
    running_mean: float
    """Trajectories in the batch, averaged over the decode steps."""

    @property
    def idle_share(self) -> float:
        """Share of its time that it neither decoded nor pulled."""
        return 1.0 - (self.busy + self.pulling) / self.up if self.up > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Plain numbers; simulated seconds throughout."""

    reason: str
    """Why it ended: Control's reason, or `time` if `max_seconds` was reached or it was halted."""
    seconds: float
    steps: tuple[StepRow, ...]
    instances: tuple[InstanceRow, ...]
    tokens: Mapping[str, int]
    """generated = trained + filtered + failed + aborted + expired + discarded + lost + in_flight."""
    staleness: Mapping[int, int]
    """Trained trajectories by step - V_traj."""
    commands: Mapping[str, int]
    """Number of commands sent: route, interrupt, abort, pull."""
    rejections: int
    cycles: int
    resampled: int
    """Stragglers sampled anew."""
    truncated: int
    """Stragglers trained on with the tokens they had."""
    finished: int
    """Trajectories with a complete response."""
    prefilled: int
    """Tokens whose KV was built, without those rebuilt by pulls."""

    @property
    def trained_tokens(self) -> int:
        """Generated tokens trained on."""
        return self.tokens["trained"]

    @property
    def staleness_mean(self) -> float:
        """Over all trained trajectories."""
        total = sum(self.staleness.values())
        return sum(lag * count for lag, count in self.staleness.items()) / total if total else 0.0

    @property
    def staleness_max(self) -> int:
        """Over all trained trajectories."""
        return max(self.staleness, default=0)

    @property
    def preemptions(self) -> int:
        """Preemptions of all instances."""
        return sum(row.preemptions for row in self.instances)

    @property
    def trainer_idle_share(self) -> float:
        """Share of the run that the trainer waited for a batch."""
        busy = sum(row.ended - row.began for row in self.steps)
        return 1.0 - busy / self.seconds if self.seconds > 0 else 0.0

    @property
    def instances_idle_share(self) -> float:
        """Mean share of the instances' time that they neither decoded nor pulled."""
        up = sum(row.up for row in self.instances)
        return 1.0 - sum(row.busy + row.pulling for row in self.instances) / up if up > 0 else 0.0

    def throughput(self, *, skip: int = 0, leave: int = 0) -> float:
        """Trained tokens per second, without the first `skip` and the last `leave` steps.

        In the first steps the instances are still filling; before the last ones no new groups are drawn.
        """
        rows = self.steps[skip : len(self.steps) - leave]
        if not rows:
            return 0.0
        began = self.steps[skip - 1].ended if skip else 0.0
        return sum(row.tokens for row in rows) / (rows[-1].ended - began)
