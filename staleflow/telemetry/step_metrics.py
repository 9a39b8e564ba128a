"""What happened between two training steps: counts, seconds and the batch, for one row of metrics.

Invariant: a figure is counted where it happens and once; `take` gives the counts since the last call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from staleflow.coordination.view import ControlView
from staleflow.data.responses import Scored
from staleflow.data.trajectory import FinishReason
from staleflow.telemetry.events import (
    BatchTaken,
    Handlers,
    PhaseBegan,
    Released,
    RewardReceived,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    WeightsPushed,
)
from staleflow.telemetry.rows import Values

GROUP_ENDS = ("filtered", "failed", "expired")
"""Reasons for which a whole group is released."""
COUNTED = (
    *(f"rollout/{reason}_groups" for reason in GROUP_ENDS),
    "rollout/surplus_members",
    "rollout/straggler_retried",
    "rollout/straggler_truncated",
    "reward/timeout_count",
    "reward/error_count",
)


class StepMetrics:
    """A listener; `take` sums up and starts anew."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: the run's clock."""
        self._now = now
        self._running_since = self._since = now()
        self._counts: Counter[str] = Counter()
        self._reward_s = 0.0
        self._generated = 0
        self._wasted = 0
        self._batch: Values = {}
        self._pushes: dict[int, float] = {}
        """Seconds by version, until the step that began with it is trained."""
        self.waited_s_total = 0.0
        """That the trainer waited for batches in this attempt."""

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            PhaseBegan: self._phase,
            RewardReceived: self._rewarded,
            Released: self._released,
            StragglerResampled: lambda _: self._counts.update(["rollout/straggler_retried"]),
            StragglerTruncated: lambda _: self._counts.update(["rollout/straggler_truncated"]),
            BatchTaken: self._batch_taken,
            WeightsPushed: self._pushed,
        }

    def _phase(self, event: PhaseBegan) -> None:
        """The time until all parts are up belongs to no step."""
        if event.phase == "running":
            self._running_since = self._since = self._now()

    def _rewarded(self, event: RewardReceived) -> None:
        reward = event.reward
        self._reward_s += reward.seconds
        if reward.status == "timeout":
            self._counts["reward/timeout_count"] += 1
        elif reward.status not in ("ok", "failed"):
            self._counts["reward/error_count"] += 1

    def _released(self, event: Released) -> None:
        if event.reason in GROUP_ENDS:
            self._counts[f"rollout/{event.reason}_groups"] += 1
        elif event.reason == "aborted":
            self._counts["rollout/surplus_members"] += len(event.trajectories)

    def _batch_taken(self, event: BatchTaken) -> None:
        """Waiting for instances to start is not waiting for a batch."""
        waited_s = min(event.waited_s, self._now() - self._running_since)
        self.waited_s_total += waited_s
        members = [s.trajectory for group in event.groups for s in group]
        lengths = [t.response_len for t in members]
        truncated = sum(t.finish_reason is FinishReason.LENGTH for t in members)
        partial = sum(t.min_version != t.max_version for t in members)
        self._batch = {
            "timing_s/wait_for_batch": waited_s,
            "rollout/reward_mean": reward_mean(event.groups),
            "rollout/response_len_mean": _mean(lengths),
            "rollout/response_len_max": max(lengths, default=0),
            "rollout/truncated_ratio": truncated / max(1, len(members)),
            "rollout/partial_ratio": partial / max(1, len(members)),
            "rollout/groups": len(event.groups),
        }

    def _pushed(self, event: WeightsPushed) -> None:
        self._pushes[event.version] = event.seconds

    def take(self, step: StepTrained, view: ControlView, tokens: Mapping[str, int]) -> Values:
        """Metrics of a finished step. `tokens`: the balance at its end."""
        now = self._now()
        wasted = tokens["filtered"] + tokens["aborted"] + tokens["discarded"]
        values: Values = {"train/step": step.step}
        values |= staleness(step, view.bound)
        values |= _lags(view, step.step + 1)
        for offset, (reserved, occupied) in enumerate(view.placement()):
            values[f"buffer/{offset}/reserved"] = reserved
            values[f"buffer/{offset}/occupied"] = occupied
        values |= self._batch
        values["rollout/tokens_per_s"] = (tokens["generated"] - self._generated) / max(
            1e-9, now - self._since
        )
        values["rollout/wasted_tokens"] = wasted - self._wasted
        values |= {name: self._counts[name] for name in COUNTED}
        values["timing_s/reward"] = self._reward_s
        values["timing_s/update"] = step.update_s
        values["timing_s/push"] = step.waited_s
        push_s = self._pushes.pop(step.step, 0.0)
        values["timing_s/push_behind"] = max(0.0, push_s - step.waited_s)
        self._since, self._generated, self._wasted = now, tokens["generated"], wasted
        self._reward_s, self._batch = 0.0, {}
        self._counts.clear()
        return values


def reward_mean(groups: Sequence[Sequence[Scored]]) -> float:
    """Mean raw reward of a batch; unusable ones are left out."""
    return _mean([s.reward.raw for group in groups for s in group if s.reward.usable])


def staleness(step: StepTrained, bound: int) -> Values:
    """How far the trained tokens lag behind the step's version."""
    lags = [step.step - t.min for t in step.trained if t.tokens]
    return {
        "staleness/mean": _mean(lags),
        "staleness/max": max(lags, default=0),
        "staleness/min": min(lags, default=0),
        "staleness/violations": sum(lag > bound for lag in lags),
    }


def _lags(view: ControlView, newest: int) -> Values:
    """How far groups that are generated, or wait for training, lag behind the newest version.

    That is the one just trained: before it, what waits would look as fresh as when it was generated.
    """
    values: Values = {}
    for name, occupied in (("in_flight", False), ("in_queue", True)):
        lags = view.lags(newest, occupied=occupied)
        values[f"staleness/{name}/mean"] = _mean(lags)
        values[f"staleness/{name}/max"] = max(lags, default=0)
    return values


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values) if values else 0.0
