"""What the loop shows of itself: rows that are kept, and a status that replaces the one before.

Invariant: observing changes nothing. The loop calls in at each turn; whoever looks (console, sinks) takes
rows and status from another thread at its own pace.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from staleflow.coordination.actions import Abort, Command
from staleflow.coordination.control import Control
from staleflow.coordination.events import InstanceReport
from staleflow.data.responses import Balance, Response, Scored
from staleflow.data.trajectory import FinishReason, Reward
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.runtime.backend import Evaluated, StepTrained
from staleflow.runtime.clock import Clock
from staleflow.runtime.length_counts import Late
from staleflow.runtime.metrics import StepMetrics, Values
from staleflow.runtime.status import InstanceRates, buffer_statuses, instance_statuses, waiting_for
from staleflow.runtime.utilization import LOOK_EVERY_S, TimeUse
from staleflow.telemetry.rows import Row, RowKind, RunStatus

STATUS_EVERY_S = 0.25
"""Time between two pictures; the console draws four times a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How often is looked, in seconds of the run's clock. Each look costs time for every instance."""

    look_s: float = LOOK_EVERY_S
    """At who works and who stands still."""
    sample_s: float = 1.0
    """Between two rows about the instances."""
    double_after: int | None = None
    """After so many rows the time between them doubles, so that a run of any length has few. None: never."""


class Observer:
    """Rows and status of one attempt."""

    def __init__(
        self,
        *,
        run_name: str,
        policy: str,
        bound: int,
        steps: int,
        longest_response: int,
        clock: Clock,
        intervals: Intervals | None = None,
        redraw: Callable[[], float] | None = None,
        has_rewards: bool = True,
    ) -> None:
        """`longest_response` is in tokens. `redraw`: seconds by which pictures become due, where those of
        the run's clock are not what somebody waits through. `has_rewards`: they mean something.
        """
        self._has_rewards = has_rewards
        self._clock = clock
        self._intervals = intervals or Intervals()
        self._redraw = redraw or clock.now
        self.began = clock.now()
        """Where `run/seconds` counts from."""
        self._metrics = StepMetrics(self.began, longest_response)
        self._rates = InstanceRates()
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self._down: dict[str, str] = {}
        self._cut: set[str] = set()
        self._sampled, self._drawn = self.began, self._redraw()
        self._samples = 0
        self._sample_s = self._intervals.sample_s
        self._trainer_busy = False
        self._pushes: dict[int, float] = {}
        """Seconds by version, until the row of the step that began with it."""
        self._waited_s = 0.0
        self._use = TimeUse(self._intervals.look_s)
        self._running_since = clock.now()
        self.last_evaluated = -1
        self._status = RunStatus(
            run_name=run_name,
            policy=policy,
            bound=bound,
            step=0,
            steps=steps,
            version=-1,
            phase="starting",
            seconds=0.0,
        )

    # ------------------------------------------------------------------ for whoever looks

    def take_rows(self) -> list[Row]:
        """Rows since the last call."""
        with self._lock:
            rows, self._rows = self._rows, []
        return rows

    @property
    def status(self) -> RunStatus:
        """The newest picture."""
        return self._status

    # ------------------------------------------------------------------ for the loop

    def phase(self, phase: str) -> None:
        """The run entered a phase."""
        if phase == "running":
            self._running_since = self._clock.now()
            self._use.start(self._running_since)
            self._metrics.start(self._running_since)
        self._status = replace(self._status, phase=phase)

    def event(self, name: str, text: str) -> None:
        """Something worth a line."""
        self._add("event", {"event/name": name, "event/text": text, "run/seconds": self._seconds()})

    def coordinated(self, seconds: float, *, in_cycle: bool) -> None:
        """Time spent in Control: in its cycle, or handling events."""
        self._metrics.coordinated(seconds, in_cycle)

    def command(self, command: Command) -> None:
        """A command goes out."""
        self._metrics.command(command)
        if isinstance(command, Abort):
            self._metrics.lengths.aborted(command)
        self._use.ordered(command)

    def reported(self, report: InstanceReport, late: Sequence[Late] = ()) -> None:
        """A report came in; `late`: what came with it for trajectories that had been dropped."""
        self._metrics.lengths.late(late)
        self._metrics.lengths.acknowledged(report.instance, report.acked_seq)
        self._metrics.reported(report)
        self._use.reported(report)
        for rejection in report.rejections:
            if rejection.stale_version:
                continue  # follows from a pull that was refused, which has a line of its own
            what = rejection.trajectory_id or "a pull"
            self.event("rejected", f"{report.instance} refused {what}: {rejection.reason}")

    def scored(self, rewards: Sequence[Reward]) -> None:
        """Rewards came in."""
        self._metrics.scored(rewards)

    def discarded(self, reason: str, trajectories: Sequence[Response]) -> None:
        """Payload was dropped: that of one group, or of redundant members, or all there is at the end."""
        if reason in ("filtered", "failed", "expired"):
            self._metrics.released(reason)
        elif reason == "aborted":
            self._metrics.surplus(len(trajectories))
        for trajectory in trajectories:
            unfinished = trajectory.finish_reason is None  # the others were counted when they finished
            self._metrics.lengths.dropped(trajectory, counts=unfinished and reason != "discarded")

    def sampled(self, trajectory: Response) -> None:
        """A trajectory is complete, or given up."""
        cut = trajectory.finish_reason is FinishReason.FAILED or trajectory.trajectory_id in self._cut
        self._cut.discard(trajectory.trajectory_id)
        self._metrics.lengths.sampled(trajectory, cut=cut)

    def resampled(self, dropped: Response, reason: str) -> None:
        """A straggler was dropped, to be sampled anew."""
        self._metrics.straggler("retried")
        self._metrics.lengths.dropped(dropped, counts=True)
        self.event("straggler", f"trajectory {dropped.trajectory_id} is sampled anew: {reason}")

    def truncated(self, trajectory: Response, reason: str) -> None:
        """A straggler was cut off where it was."""
        self._metrics.straggler("truncated")
        self._cut.add(trajectory.trajectory_id)
        self.event(
            "straggler",
            f"trajectory {trajectory.trajectory_id} is cut at {trajectory.response_len} tokens: {reason}",
        )

    def instance_up(self, instance: str) -> None:
        """An instance joined."""
        self._down.pop(instance, None)
        self.event("instance_up", f"{instance} is up")

    def instance_down(self, instance: str, reason: str) -> None:
        """An instance was lost."""
        self._down[instance] = "lost"
        self._metrics.lengths.acknowledged(instance)
        self._use.lost(instance)
        self.event("instance_down", f"{instance} was lost: {reason}")

    def batch(self, step: int, groups: Sequence[Sequence[Scored]], waited_s: float) -> None:
        """A batch goes to the trainer. Waiting for instances to start is no waiting for a batch."""
        waited_s = min(waited_s, self._clock.now() - self._running_since)
        self._trainer_busy = True
        self._use.training(self._clock.now(), True)
        self._waited_s += waited_s
        self._metrics.batch(step, groups, waited_s)

    def pushed(self, version: int, seconds: float) -> None:
        """Weights are in the parameter server; it took so long."""
        self._pushes[version] = seconds

    def trained(self, message: StepTrained, control: Control, balance: Balance) -> None:
        """A step is done: its row."""
        self._trainer_busy = False
        self._use.training(self._clock.now(), False)
        waited_s = message.waited_s + message.push_s
        behind_s = max(0.0, self._pushes.pop(message.result.version_start, 0.0) - message.waited_s)
        timing = {"update": message.update_s, "push": waited_s, "push_behind": behind_s}
        values = self._metrics.row(message.result, control, balance.as_dict(), self._clock.now(), timing)
        values |= self._use.take(self._clock.now())
        values["run/seconds"] = self._seconds()
        reward = values["rollout/reward_mean"] if self._has_rewards else values.pop("rollout/reward_mean")
        self._add("train", values)
        self._status = replace(
            self._status,
            staleness_mean=float(values["staleness/mean"]),
            staleness_max=int(values["staleness/max"]),
            reward_mean=(*self._status.reward_mean, float(reward)),
        )

    def evaluated(self, message: Evaluated) -> None:
        """An evaluation is done: its row."""
        self.last_evaluated = max(self.last_evaluated, message.version)
        values: Values = {"eval/weight_version": message.version, "run/seconds": self._seconds()}
        values |= {f"eval/{name}": value for name, value in message.values.items()}
        values["eval/seconds"] = message.seconds
        self._add("eval", values)
        sampled = next((v for k, v in message.values.items() if k.startswith("heldout/avg@")), None)
        if sampled is not None:
            self._status = replace(self._status, evals=(*self._status.evals, (message.version, sampled)))

    def tick(self, control: Control, balance: Balance) -> None:
        """A turn is over."""
        now = self._clock.now()
        self._use.look(now, control)
        if now - self._sampled >= self._sample_s:
            self._sample(control)
            self._sampled = now
        drawn = self._redraw()
        if drawn - self._drawn >= STATUS_EVERY_S:
            self._drawn = drawn
            self._picture(control, balance)

    def finish(self, control: Control, balance: Balance, extra: Mapping[str, float] | None = None) -> None:
        """The run is over: the summary row, with what else belongs into it."""
        self.phase("done")
        self._picture(control, balance)
        values: Values = {
            "run/seconds": self._seconds(),
            "run/steps": control.view.next_buffer,
            "run/reason": control.view.finished or "",
            "wait/trainer_s": self._waited_s,
            "wait/instances_s": self._use.idle_s_total,
            "run/cpu_cores": os.cpu_count() or 1,
        }
        values |= self._metrics.totals()
        costs = control.view.cost_model
        values |= {f"coord/{name}": getattr(costs, name) for name in ("k1", "k2", "k3", "k4", "prefill")}
        values |= {f"tokens/{name}": count for name, count in balance.as_dict().items()}
        values |= extra or {}
        self._add("summary", values)

    # ------------------------------------------------------------------

    def _sample(self, control: Control) -> None:
        self._samples += 1
        if self._intervals.double_after is not None and self._samples % self._intervals.double_after == 0:
            self._sample_s *= 2
        self._rates.sample(control, self._clock.now())
        values: Values = {"run/seconds": self._seconds(), "trainer/busy": int(self._trainer_busy)}
        for status in instance_statuses(control, self._rates, {}):
            prefix = f"instance/{status.instance}"
            values[f"{prefix}/version"] = status.version
            values[f"{prefix}/running"] = status.running
            values[f"{prefix}/waiting"] = status.waiting
            values[f"{prefix}/kv_usage"] = status.kv_usage
            values[f"{prefix}/tokens_per_s"] = status.tokens_per_s
            values[f"{prefix}/preemptions"] = self._metrics.preemptions(status.instance)
        self._add("instances", values)

    def _picture(self, control: Control, balance: Balance) -> None:
        instances = instance_statuses(control, self._rates, self._down)
        waiting = waiting_for(control)
        version = control.view.newest_version
        trainer = f"training step {version}" if self._trainer_busy else "idle"
        self._status = replace(
            self._status,
            step=control.view.next_buffer,
            version=version,
            seconds=self._seconds(),
            buffers=buffer_statuses(control),
            instances=instances,
            trainer=trainer,
            waiting_for=waiting,
            pending=control.view.count(TrajectoryState.PENDING),
            scoring=control.view.count(TrajectoryState.GENERATED),
            in_flight=control.view.count(TrajectoryState.RUNNING),
            tokens_per_s=sum(status.tokens_per_s for status in instances),
            tokens=balance.as_dict(),
        )

    def _seconds(self) -> float:
        return self._clock.now() - self.began

    def _add(self, kind: RowKind, values: Values) -> None:
        row = Row(kind=kind, time=self._clock.wall(), values=values)
        with self._lock:
            self._rows.append(row)
