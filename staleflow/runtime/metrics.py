"""What happened between two training steps, summed up for one row of metrics.

Invariant: a figure is counted where it happens and once; a row holds the counts since the last row, except
`tokens/...`, which are totals of this attempt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from staleflow.coordination.actions import Command
from staleflow.coordination.control import Control
from staleflow.coordination.events import InstanceReport
from staleflow.data.responses import Scored
from staleflow.data.trajectory import FinishReason, Reward
from staleflow.runtime.command_costs import CommandCosts
from staleflow.runtime.length_counts import LengthCounts
from staleflow.training.trainer import TrainResult

Values = dict[str, float | int | str]

COUNTED = (
    "filtered_groups",
    "failed_groups",
    "expired_groups",
    "surplus_members",
    "straggler_retried",
    "straggler_truncated",
)
"""Counts of the section `rollout` in a train row."""


class StepMetrics:
    """Collects; `row` sums up and starts anew."""

    def __init__(self, now: float, longest_response: int) -> None:
        """Seconds on the run's clock; tokens."""
        self._since = now
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._generated = 0
        self._wasted = 0
        self._batches: dict[int, Values] = {}
        self.lengths = LengthCounts(longest_response)
        self._costs = CommandCosts()
        self._costs_before = self._costs.totals()

    def command(self, command: Command) -> None:
        """A command was sent."""
        self._costs.command(command)

    def coordinated(self, seconds: float, in_cycle: bool) -> None:
        """Time spent in `Control`: in its cycle, or handling events."""
        self._costs.coordinated(seconds, in_cycle)

    def reported(self, report: InstanceReport) -> None:
        """An instance sent its report."""
        self._costs.reported(report)

    def preemptions(self, instance: str) -> int:
        """Those of one instance in this attempt."""
        return self._costs.preemptions.get(instance, 0)

    def totals(self) -> dict[str, float]:
        """What commands and instances cost in this attempt, and how long its trajectories were."""
        return self._costs.totals() | self.lengths.totals()

    def scored(self, rewards: Iterable[Reward]) -> None:
        """Verifier answers came in."""
        for reward in rewards:
            self._seconds["timing_s/reward"] += reward.seconds
            if reward.status == "timeout":
                self._counts["reward/timeout_count"] += 1
            elif reward.status not in ("ok", "failed"):
                self._counts["reward/error_count"] += 1

    def released(self, reason: str) -> None:
        """A group was released."""
        self._counts[f"rollout/{reason}_groups"] += 1

    def surplus(self, members: int) -> None:
        """So many redundant members were aborted."""
        self._counts["rollout/surplus_members"] += members

    def straggler(self, action: str) -> None:
        """A straggler was `retried` or `truncated`."""
        self._counts[f"rollout/straggler_{action}"] += 1

    def start(self, now: float) -> None:
        """All parts are up: the time before belongs to no step."""
        self._since = now

    def batch(self, step: int, groups: Sequence[Sequence[Scored]], waited_s: float) -> None:
        """A batch was handed to the trainer, which had waited for it."""
        self.lengths.trained(groups)
        members = [s for group in groups for s in group]
        rewards = [s.reward.raw for s in members if s.reward.usable]
        lengths = [s.trajectory.response_len for s in members]
        truncated = sum(s.trajectory.finish_reason is FinishReason.LENGTH for s in members)
        partial = sum(s.trajectory.min_version != s.trajectory.max_version for s in members)
        self._batches[step] = {
            "timing_s/wait_for_batch": waited_s,
            "rollout/reward_mean": _mean(rewards),
            "rollout/response_len_mean": _mean(lengths),
            "rollout/response_len_max": max(lengths, default=0),
            "rollout/truncated_ratio": truncated / max(1, len(members)),
            "rollout/partial_ratio": partial / max(1, len(members)),
            "rollout/groups": len(groups),
        }

    def row(
        self,
        result: TrainResult,
        control: Control,
        tokens: Mapping[str, int],
        now: float,
        timing: Mapping[str, float],
    ) -> Values:
        """The row of a finished step; counting starts anew."""
        step, seconds = result.version_start, max(1e-9, now - self._since)
        wasted = tokens["filtered"] + tokens["aborted"] + tokens["discarded"]
        values: Values = {"train/step": step}
        values |= _staleness(result, control.view.bound)
        values |= _lags(control, result.version)
        for offset, (reserved, occupied) in enumerate(control.view.placement()):
            values[f"buffer/{offset}/reserved"] = reserved
            values[f"buffer/{offset}/occupied"] = occupied
        values |= self._batches.pop(step, {})
        values["rollout/tokens_per_s"] = (tokens["generated"] - self._generated) / seconds
        values["rollout/wasted_tokens"] = wasted - self._wasted
        costs = self._costs.totals()
        values |= {name: value - self._costs_before[name] for name, value in costs.items()}
        self._costs_before = costs
        if control.view.cost_error is not None:
            values["coord/cost_model_error"] = control.view.cost_error
        values |= {f"rollout/{name}": self._counts[f"rollout/{name}"] for name in COUNTED}
        values |= self.lengths.take()
        values |= {f"reward/{k}_count": self._counts[f"reward/{k}_count"] for k in ("timeout", "error")}
        values["timing_s/reward"] = self._seconds["timing_s/reward"]
        values |= {f"timing_s/{name}": value for name, value in timing.items()}
        values |= result.metrics
        values |= {f"tokens/{name}": count for name, count in tokens.items()}
        self._since, self._generated, self._wasted = now, tokens["generated"], wasted
        self._counts.clear()
        self._seconds.clear()
        return values


def _staleness(result: TrainResult, bound: int) -> Values:
    lags = [result.version_start - t.min_version for t in result.trained if t.tokens]
    return {
        "staleness/mean": _mean(lags),
        "staleness/max": max(lags, default=0),
        "staleness/min": min(lags, default=0),
        "staleness/violations": sum(lag > bound for lag in lags),
    }


def _lags(control: Control, newest: int) -> Values:
    """How far groups that are generated, or wait for training, lag behind the newest version.

    That is the one just pushed: before its push, what waits would look as fresh as when it was generated.
    """
    values: Values = {}
    for name, occupied in (("in_flight", False), ("in_queue", True)):
        lags = control.view.lags(newest, occupied=occupied)
        values[f"staleness/{name}/mean"] = _mean(lags)
        values[f"staleness/{name}/max"] = max(lags, default=0)
    return values


def _mean(values: list[int] | list[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0
