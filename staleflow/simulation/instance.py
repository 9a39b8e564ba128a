"""A simulated rollout instance: decoding in closed form, commands between decode steps, and reports.

Invariants:

- it changes only at *boundaries*, the ends of decode steps: a command that arrives during a step is applied
  at its end, as in a real engine;
- during a pull it neither decodes nor reports.

Events are: the first running trajectory ends, the KV cache is full, a command has arrived. Each costs
O(log n); a pull costs O(n), as it rebuilds all KV anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.events import InstanceReport, Rejection, TrajectoryReport
from staleflow.rollout.engine import OnPull
from staleflow.simulation.decoding import DecodingBatch
from staleflow.simulation.trajectory import SimulatedTrajectory


class SimulatedInstance(DecodingBatch):
    """Send commands with `deliver`; call `advance` at the time `next_event`, then `take_report`.

    `find` returns the trajectory of a Route, None if it was dropped meanwhile; `newest` returns the newest
    pushed weight version. `began` is the start time of the incarnation.
    """

    def __init__(
        self,
        *,
        instance: str,
        incarnation: int,
        version: int,
        costs: CostModel,
        kv_capacity: int,
        max_running: int,
        on_pull: OnPull,
        find: Callable[[str], SimulatedTrajectory | None],
        newest: Callable[[], int],
        began: float = 0.0,
        slowness: float = 1.0,
    ) -> None:
        super().__init__(
            version=version,
            costs=costs,
            kv_capacity=kv_capacity,
            max_running=max_running,
            began=began,
            slowness=slowness,
        )
        self.instance = instance
        self.incarnation = incarnation
        self.began = began
        self.next_event: float | None = None
        """Time of the boundary with the next event; None: only a command can change anything."""
        self.plan = 0
        """Increases whenever `next_event` changes."""
        self.scheduled = 0
        """Set by the owner: the last plan that it has queued."""
        self.has_news = False
        self._turned = False
        """Since the last report a trajectory left, a command was refused, or one other than Route arrived."""
        self._reported_empty = True
        """The last report showed that it has nothing to do."""
        self._planned_steps = 0
        self._pulling = False
        self._on_pull = on_pull
        self._find = find
        self._newest = newest
        self._inbox: deque[tuple[float, Command]] = deque()
        self._new_slowness: deque[tuple[float, float]] = deque()
        self._acked_seq = 0
        self._revision = 0
        self.pull_s = 0.0
        self.pulls = 0
        self.rebuilt = 0
        self._start_report()

    def _start_report(self) -> None:
        self._rejections: list[Rejection] = []
        self._finished: list[TrajectoryReport] = []
        self._interrupted: list[TrajectoryReport] = []
        self._aborted: list[str] = []
        self._left: list[SimulatedTrajectory] = []
        self.has_news = False
        self._reported_empty = not self._running and not self._waiting
        self._turned = False

    @property
    def has_urgent_news(self) -> bool:
        """True if there is news beyond the expected: that it decodes the trajectories routed to it."""
        return self.has_news and bool(self._turned or self._reported_empty or self._waiting)

    # ------------------------------------------------------------------ interface

    def deliver(self, arrival: float, command: Command) -> None:
        """Queue a command arriving at `arrival`, not before earlier ones; then call `replan`."""
        self._inbox.append((arrival, command))

    def slow_down(self, at: float, slowness: float) -> None:
        """From the first boundary after `at`, multiply all times by `slowness`."""
        self._new_slowness.append((at, slowness))
        self.replan()

    def settle(self, now: float) -> None:
        """Do the decode steps that are complete by `now`; the plan stays."""
        if self._running and now > self.at:
            pace = self._pace()
            steps = min(pace.steps_within(now - self.at), self._planned_steps)
            if steps:
                self._decode(steps, self.at + pace.seconds(steps))
                self._planned_steps -= steps

    def advance(self) -> None:
        """Decode up to `next_event` and process the event."""
        assert self.next_event is not None
        now = max(self.at, self.next_event)
        self._decode(self._planned_steps, now)
        if self._ends:
            for trajectory in self._take_finished():
                reason = "length" if trajectory.truncated else "stop"
                self._finished.append(self._leaves(trajectory, reason))
        if self._inbox or self._new_slowness:
            self._obey()
        self._pulling = self.at > now
        if not self._pulling:
            if self._kv + len(self._running) > self.kv_capacity:
                self._make_room()
            if self._waiting:
                self._fill()
        self.replan()

    def replan(self) -> None:
        """Find the boundary of the next event."""
        if self._pulling:  # commands that arrive during a pull are applied before the next step is formed
            self.plan += self.next_event != self.at
            self.next_event, self._planned_steps = self.at, 0
            return
        steps, at = 0, None
        n = len(self._running)
        if n:
            steps, room = self._first_end() - self.steps, (self.kv_capacity - self._kv) // n
            if room < steps:
                steps = room
            pace = self._pace()
            at = self.at + pace.seconds(steps)
        arrival = self._first_arrival() if self._inbox or self._new_slowness else None
        if arrival is not None and (at is None or arrival < at):
            if arrival <= self.at or not n:
                steps, at = 0, max(arrival, self.at)
            else:
                steps = min(steps, pace.steps_until(arrival - self.at))
                at = self.at + pace.seconds(steps)
        if at != self.next_event or steps != self._planned_steps:
            self.plan += 1
        self.next_event, self._planned_steps = at, steps

    def _first_arrival(self) -> float | None:
        if self._new_slowness:
            changes = self._new_slowness[0][0]
            return min(changes, self._inbox[0][0]) if self._inbox else changes
        return self._inbox[0][0] if self._inbox else None

    def take_report(self, *, progress: bool) -> InstanceReport:
        """Everything since the last report; acknowledges applied commands. `progress`: add the lengths."""
        lengths = self._progress() if progress else ()
        for trajectory in self._left:
            trajectory.reported = trajectory.base
            trajectory.instance = None
        self._revision += 1
        report = InstanceReport(
            instance=self.instance,
            incarnation=self.incarnation,
            revision=self._revision,
            version=self.version,
            acked_seq=self._acked_seq,
            rejections=tuple(self._rejections),
            finished=tuple(self._finished),
            interrupted=tuple(self._interrupted),
            aborted=tuple(self._aborted),
            lengths=lengths,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=self._kv,
            kv_capacity=self.kv_capacity,
            preemptions=self.preemptions,
            generated_tokens=self.generated,
            busy_seconds=self.busy_s,
            pull_seconds=self.pull_s,
            rebuilt_tokens=self.rebuilt,
            pulls=self.pulls,
            decode_steps=self.steps,
            running_steps=self.running_steps,
            kv_token_steps=self.kv_token_steps,
            prefilled_tokens=self.prefilled,
        )
        self._start_report()
        return report

    def _progress(self) -> tuple[tuple[str, int], ...]:
        lengths = []
        for trajectory in self._running.values():
            length = trajectory.base + self.steps - trajectory.since
            if length > trajectory.reported:
                trajectory.reported = length
                lengths.append((trajectory.trajectory_id, length))
        for trajectory in self._waiting.values():
            if trajectory.base > trajectory.reported:
                trajectory.reported = trajectory.base
                lengths.append((trajectory.trajectory_id, trajectory.base))
        return tuple(lengths)

    def stop(self) -> list[SimulatedTrajectory]:
        """End the instance; returns all trajectories that it held, or that left without being reported."""
        for trajectory in self._running.values():
            trajectory.fold(self.steps, self.version)
        held = [*self._running.values(), *self._waiting.values(), *self._left]
        for trajectory in held:
            trajectory.stay += 1
            trajectory.instance = None
        self._running.clear()
        self._waiting.clear()
        self._inbox.clear()
        self._start_report()
        self.next_event = None
        self.plan += 1
        return held

    def _leaves(self, trajectory: SimulatedTrajectory, reason: str | None) -> TrajectoryReport:
        self._left.append(trajectory)
        self.has_news = self._turned = True
        return TrajectoryReport(trajectory.trajectory_id, trajectory.base, trajectory.min_version, reason)

    # ------------------------------------------------------------------ commands

    def _obey(self) -> None:
        """Apply the commands that have arrived; a pull takes time, during which more may arrive."""
        while self._new_slowness and self._new_slowness[0][0] <= self.at:
            self.slowness = self._new_slowness.popleft()[1]
        inbox = self._inbox
        while inbox and inbox[0][0] <= self.at:
            _, command = inbox.popleft()
            self._turned = self._turned or not isinstance(command, Route)
            match command:
                case Route():
                    self._route(command)
                case Interrupt(trajectory_id=identity):
                    gone = self._remove(identity)
                    if gone is not None:
                        self._interrupted.append(self._leaves(gone, None))
                case Abort(trajectory_id=identity):
                    gone = self._remove(identity)
                    if gone is not None:
                        self._leaves(gone, None)
                        self._aborted.append(identity)
                case Pull():
                    self._pull()
            self._acked_seq = command.seq
            self.has_news = True

    def _route(self, command: Route) -> None:
        trajectory = self._find(command.trajectory_id)
        if trajectory is None:
            self._reject(command, "the trajectory was dropped before its Route arrived")
        elif self.version < command.min_version:
            reason = f"version {self.version} is older than {command.min_version}"
            self._reject(command, reason, stale_version=True)
        else:
            trajectory.instance = self.instance
            self._waiting[command.trajectory_id] = trajectory

    def _reject(self, command: Route, reason: str, *, stale_version: bool = False) -> None:
        self._turned = True
        self._rejections.append(
            Rejection(
                seq=command.seq,
                trajectory_id=command.trajectory_id,
                reason=reason,
                stale_version=stale_version,
            )
        )

    def _pull(self) -> None:
        newest = self._newest()
        if newest <= self.version:
            return  # an earlier pull loaded a newer version than it asked for
        for trajectory in self._running.values():
            trajectory.fold(self.steps, self.version)
        rebuilt = self._kv - self._due if self._on_pull == "recompute" else 0
        seconds = self._costs.pull + self._costs.prefill * rebuilt
        self.version = newest
        self.at += seconds * self.slowness
        self.pull_s += seconds * self.slowness
        self.pulls += 1
        self.rebuilt += rebuilt
