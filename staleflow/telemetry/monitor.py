"""What a run shows of itself: rows that are kept, and a status that replaces the one before.

Rows and status may be taken from another thread than that of the run loop, at its own pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from staleflow.telemetry.command_costs import CommandCosts
from staleflow.telemetry.event_rows import EventRows
from staleflow.telemetry.events import EventStream, Handlers
from staleflow.telemetry.instance_rows import InstanceRates, InstanceRows
from staleflow.telemetry.length_counts import LengthCounts
from staleflow.telemetry.row_queue import RowQueue
from staleflow.telemetry.rows import Row, RunStatus
from staleflow.telemetry.run_metrics import RunMetrics
from staleflow.telemetry.status import StatusPicture
from staleflow.telemetry.step_metrics import StepMetrics
from staleflow.telemetry.utilization import LOOK_EVERY_S, TimeUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Sampling periods, in seconds of the run's clock. Each sample is O(instances)."""

    look_s: float = LOOK_EVERY_S
    """Between two looks at which parts work and which stand still."""
    sample_s: float = 1.0
    """Between two rows about the instances."""
    double_after: int | None = None
    """After so many rows the time between them doubles, so that a run of any length has few. None: never."""


class RunMonitor:
    """A listener: rows and status of one attempt."""

    def __init__(
        self,
        *,
        run_name: str,
        policy: str,
        bound: int,
        steps: int,
        longest_response: int,
        now: Callable[[], float],
        wall: Callable[[], float],
        intervals: Intervals | None = None,
        redraw: Callable[[], float] | None = None,
        has_rewards: bool = True,
        extra_summary: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`longest_response` is in tokens. `now`: the run's clock; `wall`: seconds since the epoch.
        `redraw`: the clock by which pictures become due (None: `now`). `has_rewards`: they mean something.
        `extra_summary`: what else the summary says; asked when the run has ended.
        """
        intervals = intervals or Intervals()
        self._rows = RowQueue(now, wall)
        rates, costs, lengths = InstanceRates(), CommandCosts(), LengthCounts(longest_response)
        step, time_use = StepMetrics(now), TimeUse(now, intervals.look_s)
        metrics = RunMetrics(
            self._rows,
            step=step,
            costs=costs,
            lengths=lengths,
            time_use=time_use,
            has_rewards=has_rewards,
            extra_summary=extra_summary,
        )
        samples = InstanceRows(
            self._rows,
            rates,
            now=now,
            sample_s=intervals.sample_s,
            double_after=intervals.double_after,
            preemptions=costs.preemptions,
        )
        status = RunStatus(
            run_name=run_name,
            policy=policy,
            bound=bound,
            step=0,
            steps=steps,
            version=-1,
            phase="starting",
            seconds=0.0,
        )
        self._picture = StatusPicture(status, rates, seconds=self._rows.seconds, redraw=redraw or now)
        self._parts = EventStream(
            [costs, lengths, step, time_use, metrics, samples, EventRows(self._rows), self._picture]
        )

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return self._parts.handlers()

    @property
    def began(self) -> float:
        """When the attempt began, on the run's clock."""
        return self._rows.began

    def take_rows(self) -> list[Row]:
        """Rows since the last call."""
        return self._rows.take()

    @property
    def status(self) -> RunStatus:
        """The newest picture."""
        return self._picture.status
