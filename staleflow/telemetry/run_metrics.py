"""The rows of a run: one for each training step and each evaluation, and the summary at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from staleflow.coordination.view import ControlView
from staleflow.data.responses import Balance
from staleflow.telemetry.command_costs import CommandCosts
from staleflow.telemetry.events import Evaluated, Handlers, RunBegan, RunEnded, StepTrained
from staleflow.telemetry.length_counts import LengthCounts
from staleflow.telemetry.row_queue import RowQueue
from staleflow.telemetry.rows import Values
from staleflow.telemetry.step_metrics import StepMetrics
from staleflow.telemetry.utilization import TimeUse

COSTS = ("k1", "k2", "k3", "k4", "prefill")
"""What the summary says of the cost model."""


class RunMetrics:
    """A listener. What it sums up comes from other listeners, which hear of each event before it."""

    def __init__(
        self,
        rows: RowQueue,
        *,
        step: StepMetrics,
        costs: CommandCosts,
        lengths: LengthCounts,
        time_use: TimeUse,
        has_rewards: bool,
        extra_summary: Callable[[], Mapping[str, float]],
    ) -> None:
        """`has_rewards`: they mean something. `extra_summary`: what else the summary says."""
        self._rows = rows
        self._step = step
        self._costs = costs
        self._lengths = lengths
        self._time_use = time_use
        self._has_rewards = has_rewards
        self._extra_summary = extra_summary
        self._view: ControlView
        self._balance: Balance

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            RunBegan: self._began,
            StepTrained: self._trained,
            Evaluated: self._evaluated,
            RunEnded: self._ended,
        }

    def _began(self, event: RunBegan) -> None:
        self._view, self._balance = event.view, event.balance

    def _trained(self, event: StepTrained) -> None:
        tokens = self._balance.as_dict()
        values = self._step.take(event, self._view, tokens)
        values |= self._costs.take() | self._lengths.take() | self._time_use.take()
        if self._view.cost_error is not None:
            values["coord/cost_model_error"] = self._view.cost_error
        values |= event.metrics
        values |= _balance(tokens)
        if not self._has_rewards:
            del values["rollout/reward_mean"]
        self._rows.add("train", values)

    def _evaluated(self, event: Evaluated) -> None:
        values: Values = {"eval/weight_version": event.version, "eval/seconds": event.seconds}
        values |= {f"eval/{name}": value for name, value in event.values.items()}
        self._rows.add("eval", values)

    def _ended(self, _: RunEnded) -> None:
        view, model = self._view, self._view.cost_model
        values: Values = {
            "run/steps": view.next_buffer,
            "run/reason": view.finished or "",
            "run/cpu_cores": os.cpu_count() or 1,
            "wait/trainer_s": self._step.waited_s_total,
            "wait/instances_s": self._time_use.idle_s_total,
        }
        values |= self._costs.totals() | self._lengths.totals()
        values |= {f"coord/{name}": getattr(model, name) for name in COSTS}
        values |= _balance(self._balance.as_dict())
        values |= self._extra_summary()
        self._rows.add("summary", values)


def _balance(tokens: Mapping[str, int]) -> Values:
    return {f"tokens/{name}": count for name, count in tokens.items()}
