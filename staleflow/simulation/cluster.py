"""The event loop of a simulated cluster: what `runtime.loop` is to machines, this is to a virtual clock.

::

    heap of (time, what) ──next──> instances, trainer, rewards ──events──> Control ──effects──> the same
                                                                  ^
    a cycle follows news, at the earliest interval_s after the last one; without news there is none

Invariants: time never goes back; events of one moment come before its cycle, in the order in which they were
foreseen; nothing but the settings, the control and their seeds enters, so the same settings give the same
ledger, byte for byte; only living trajectories are in memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from staleflow.coordination.commands import Command
from staleflow.coordination.control import Control
from staleflow.coordination.effects import (
    Append,
    Discard,
    DrawGroups,
    Effect,
    Finish,
    GiveUp,
    Resample,
    Score,
    Send,
    Train,
    Truncate,
)
from staleflow.coordination.events import (
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
)
from staleflow.coordination.reports import InstanceReport
from staleflow.errors import RunFailed
from staleflow.protocol.records import Record, Start, Trained, TrainedMember
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.measures import Measures
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.settings import ClusterSettings, Outage
from staleflow.simulation.store import TrajectoryStore
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.simulation.watch import Watch

AppendRecord = Callable[[Record, int, int], None]
"""(record, sequence number, attempt): `LedgerWriter.append` is one."""

CYCLES_ALONE = 1000
"""So many cycles in a row with nothing under way are a standstill, whatever the coordinator waits for."""


class SimulatedCluster:
    """One run, from start to Finish. `run` may be called once."""

    def __init__(
        self,
        *,
        control: Control,
        settings: ClusterSettings,
        opening: Start,
        append: AppendRecord | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`opening` is the ledger's first record; `append` gets all of them, in order."""
        self._control = control
        self._settings = settings
        self._opening = opening
        self._append = append
        self._watch = watch or Watch()
        self._stop = False
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._events: deque[Event] = deque()
        self._working = False
        self._cycle_at: float | None = None
        self._alone = 0
        self._last_cycle = -settings.interval_s
        self._instances: dict[str, SimulatedInstance] = {}
        self._touched: dict[str, SimulatedInstance] = {}
        self._foreseen: dict[str, int] = {}
        self._unreported: dict[str, SimulatedInstance] = {}
        """Those that have acknowledged something and nothing else: only the next cycle wants to know it."""
        self._progress_foreseen = False
        self._slowness = dict.fromkeys(range(settings.instances), 1.0)
        self._given_up: set[str] = set()
        self._version = 0
        self._idle_since = 0.0
        workers = settings.reward_workers
        self._rewards_free = None if workers is None else [0.0] * workers
        self._measures = Measures()
        self._store = TrajectoryStore(settings, self._measures.tokens)

    # ------------------------------------------------------------------ the loop

    def run(self, *, max_seconds: float | None = None) -> SimulationResult:
        """Run to the end, or to `max_seconds` of simulated time. Raises RunFailed when nothing can go on."""
        self._watch.begin(self)
        self._perform(self._control.note(self._opening))
        self._push(0)
        for number in range(self._settings.instances):
            self._join(number, 1)
        for outage in self._settings.outages:
            self._foresee(outage.at, self._die, outage)
        for slowdown in self._settings.slowdowns:
            self._foresee(slowdown.at, self._slow_down, slowdown.instance, slowdown.factor)
        limit = float("inf") if max_seconds is None else max_seconds
        while self._control.finished is None and self._turn(limit):
            pass
        return self._result(self._control.finished or "time")

    def request_stop(self) -> None:
        """Finish the step in training, and end. Safe to call from another thread."""
        self._stop = True

    def find(self, trajectory_id: str) -> SimulatedTrajectory | None:
        """A living trajectory that is still wanted."""
        return self._store.find(trajectory_id)

    def balance(self) -> dict[str, int]:
        """Generated tokens, as far as decoding has come, by what became of them; what an instance took with
        it when it was lost was never known to be generated.
        """
        tokens = self._measures.tokens
        generated = self._measures.generated + sum(i.generated for i in self._instances.values())
        values = {
            "generated": generated - tokens["lost"],
            "trained": tokens["trained"],
            "filtered": tokens["filtered"],
            "aborted": tokens["aborted"],
            "discarded": tokens["failed"] + tokens["expired"] + tokens["discarded"],
        }
        values["in_flight"] = 2 * values["generated"] - sum(values.values())
        return values

    def _turn(self, limit: float) -> bool:
        """The next event or cycle; False when it would be beyond `limit`."""
        heap, cycle_at = self._heap, self._cycle_at
        if heap and (cycle_at is None or heap[0][0] <= cycle_at):
            if heap[0][0] > limit:
                self.now = limit
                return False
            self.now, _, happen, arguments = heapq.heappop(heap)
            happen(*arguments)
            return True
        self._alone = 0 if heap else self._alone + 1
        if cycle_at is None or self._alone > CYCLES_ALONE:
            raise RunFailed(
                f"the simulation is stuck after {self.now:g} s in step {self._control.buffer.next_buffer}: "
                f"nothing is under way, and the coordinator orders nothing"
            )
        if cycle_at > limit:
            self.now = limit
            return False
        self.now = cycle_at
        self._cycle()
        return True

    def _foresee(self, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, happen, arguments))

    def _cycle(self) -> None:
        self._last_cycle = self.now
        self._cycle_at = None
        self._measures.cycles += 1
        if self._unreported:
            late, self._unreported = self._unreported, {}
            for instance in late.values():
                instance.settle(self.now)
                if instance.has_news and instance.at <= self.now:
                    self._deliver_report(instance, progress=False)
            self._cycle_at = None
        if self._stop and not self._control.batches.stopping:
            self._perform(self._control.handle(StopRequested()))
        self._perform(self._control.cycle(self.now))
        wake_at = self._control.wake_at
        if wake_at is not None:
            self._want_cycle(wake_at)
        self._watch.cycled()

    def _want_cycle(self, at: float) -> None:
        at = max(at, self._last_cycle + self._settings.interval_s)
        if self._cycle_at is None or at < self._cycle_at:
            self._cycle_at = at

    # ------------------------------------------------------------------ control

    def _tell(self, event: Event) -> None:
        """Tell an event; one that comes up while effects are performed waits for the rest of them."""
        if self._working:
            self._events.append(event)
        else:
            self._perform(self._control.handle(event))
            self._want_cycle(self.now)

    def _perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects, then the events that come up, one after the other."""
        if effects:
            self._working = True
            self._apply(effects)
            while self._events:
                self._apply(self._control.handle(self._events.popleft()))
                self._want_cycle(self.now)
            self._working = False
        if self._touched:
            for instance in self._touched.values():
                instance.replan()
                self._foresee_instance(instance)
            self._touched.clear()

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Append(record=record, seq=seq, attempt=attempt):
                    if self._append is not None:
                        self._append(record, seq, attempt)
                case Send(command=command):
                    self._send(command)
                case Score(trajectory_id=trajectory_id):
                    self._score(trajectory_id)
                case DrawGroups(count=count, padding=padding):
                    self._draw(count, padding)
                case Discard(trajectory_ids=ids, reason=reason):
                    self._watch.discarded(ids, reason)
                    self._store.discard(ids, reason)
                    if self._given_up:
                        self._given_up.difference_update(ids)
                case Resample(trajectory_id=trajectory_id, new_id=new_id, reason=reason):
                    self._measures.resampled += 1
                    self._watch.resampled(trajectory_id, new_id, reason)
                    self._store.resample(trajectory_id, new_id)
                case Truncate(trajectory_id=trajectory_id, reason=reason):
                    self._measures.truncated += 1
                    self._store.truncate(trajectory_id)
                    self._watch.truncated(trajectory_id, reason)
                case GiveUp(trajectory_id=trajectory_id, reason=reason):
                    self._given_up.add(trajectory_id)
                    self._watch.gave_up(trajectory_id, reason)
                case Train():
                    self._train(effect)
                case Finish(reason=reason):
                    self._watch.finished(reason)

    def _send(self, command: Command) -> None:
        self._measures.commands[type(command).__name__.lower()] += 1
        self._watch.command(command)
        instance = self._instances.get(command.instance)
        if instance is not None and instance.incarnation == command.incarnation:
            instance.deliver(self.now + self._settings.command_s, command)
            self._touched[command.instance] = instance

    def _draw(self, count: int, padding: bool) -> None:
        groups, exhausted = self._store.draw(count, padding=padding)
        self._watch.drawn(groups)
        self._tell(GroupsDrawn(groups=groups))
        if exhausted:
            self._tell(SourceExhausted())

    # ------------------------------------------------------------------ reward and training

    def _score(self, trajectory_id: str) -> None:
        self._watch.scoring(trajectory_id)
        begins = self.now
        if self._rewards_free is not None:
            begins = max(begins, heapq.heappop(self._rewards_free))
        done = begins + self._settings.reward_s
        if self._rewards_free is not None:
            heapq.heappush(self._rewards_free, done)
        if done <= self.now:
            self._rewarded(trajectory_id)
        else:
            self._foresee(done, self._rewarded, trajectory_id)

    def _rewarded(self, trajectory_id: str) -> None:
        trajectory = self._store.find(trajectory_id)
        if trajectory is not None:
            raw, usable = self._settings.reward(trajectory_id), trajectory_id not in self._given_up
            self._watch.scored(trajectory_id, raw, usable, self._settings.reward_s)
            self._tell(
                Rewarded(
                    trajectory_id=trajectory_id,
                    raw=raw,
                    usable=usable,
                    token_hash=trajectory.hashed(),
                )
            )

    def _train(self, effect: Train) -> None:
        costs = self._settings.trainer
        members = self._store.take(m for _, group in effect.groups for m in group)
        update_s = costs.fixed_s + costs.token_s * sum(t.base for t in members)
        self._measures.begin_step(effect.step, members, began=self.now, idle_since=self._idle_since)
        self._watch.batch(effect, members, self.now - self._idle_since)
        trained = tuple(
            [
                TrainedMember(
                    id=t.trajectory_id,
                    min=_or(t.min_version, effect.step),
                    max=_or(t.max_version, effect.step),
                    tokens=t.response,
                    hash=t.token_hash,
                )
                for t in members
            ]
        )
        record = Trained(step=effect.step, version=effect.step, trajectories=trained)
        self._foresee(self.now + (update_s + costs.push_s), self._trained, record, update_s)

    def _trained(self, record: Trained, update_s: float) -> None:
        self._idle_since = self.now
        self._measures.end_step(ended=self.now)
        self._given_up.difference_update(t.id for t in record.trajectories)
        self._version = record.step + 1
        self._tell(TrainedStep(record=record))
        self._watch.trained(record, update_s, self._settings.trainer.push_s)
        self._push(self._version)

    def _push(self, version: int) -> None:
        self._watch.pushed(version)
        self._tell(Pushed(version=version))

    # ------------------------------------------------------------------ instances

    def _join(self, number: int, incarnation: int) -> None:
        settings, name = self._settings, f"instance-{number}"
        self._instances[name] = SimulatedInstance(
            instance=name,
            incarnation=incarnation,
            version=self._version,
            costs=settings.costs,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
            on_pull=settings.on_pull,
            find=self._store.find,
            newest=self._newest,
            began=self.now,
            slowness=self._slowness[number],
        )
        self._foreseen[name] = 0
        event = InstanceJoined(
            instance=name,
            incarnation=incarnation,
            version=self._version,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
        )
        self._watch.joined(event)
        self._tell(event)

    def _newest(self) -> int:
        return self._version

    def _foresee_instance(self, instance: SimulatedInstance) -> None:
        if instance.next_event is not None and self._foreseen[instance.instance] != instance.plan:
            self._foreseen[instance.instance] = instance.plan
            self._foresee(instance.next_event, self._advance, instance, instance.plan)
        if instance.running and not self._progress_foreseen:
            self._progress_foreseen = True
            self._foresee(self.now + self._settings.progress_interval_s, self._progress)

    def _advance(self, instance: SimulatedInstance, plan: int) -> None:
        if plan != instance.plan:
            return
        instance.advance()
        self._foresee_instance(instance)
        if instance.has_news and instance.at <= self.now:  # while it pulls, it says nothing
            if instance.has_urgent_news or self._settings.report_s > 0:
                self._deliver_report(instance, progress=False)
            else:
                self._unreported[instance.instance] = instance
                self._want_cycle(self.now)

    def _progress(self) -> None:
        """All instances tell the lengths of what they are at."""
        self._progress_foreseen = False
        for instance in list(self._instances.values()):
            instance.settle(self.now)
            if instance.running and instance.at <= self.now:
                self._deliver_report(instance, progress=True)
            self._foresee_instance(instance)

    def _deliver_report(self, instance: SimulatedInstance, *, progress: bool) -> None:
        report = instance.take_report(progress=progress)
        if self._store.leaving:
            self._store.left(report.aborted)
            self._store.left(t.trajectory_id for t in (*report.finished, *report.interrupted))
        if self._settings.report_s > 0:
            self._foresee(self.now + self._settings.report_s, self._reported, report)
        else:
            self._reported(report)

    def _reported(self, report: InstanceReport) -> None:
        self._measures.reported(report)
        self._watch.reported(report)
        self._tell(Reported(report=report))

    def _die(self, outage: Outage) -> None:
        name = f"instance-{outage.instance}"
        instance = self._instances.pop(name, None)
        if instance is None:
            return
        instance.settle(self.now)
        if instance.has_news and instance.at <= self.now:
            self._deliver_report(instance, progress=False)
        self._unreported.pop(name, None)
        held = instance.stop()
        self._measures.tokens["lost"] += sum(t.cut(t.reported) for t in held)
        self._measures.left(instance, self.now)
        lengths = tuple((t.trajectory_id, t.base) for t in held)
        self._store.left(t.trajectory_id for t in held)
        event = InstanceLost(
            instance=name, incarnation=instance.incarnation, lengths=lengths, reason="scripted outage"
        )
        self._foresee(self.now + self._settings.report_s, self._lost, event)
        if outage.down_s is not None:
            back = self.now + max(outage.down_s, self._settings.report_s)
            self._foresee(back, self._join, outage.instance, instance.incarnation + 1)

    def _lost(self, event: InstanceLost) -> None:
        self._watch.lost(event)
        self._tell(event)

    def _slow_down(self, number: int, factor: float) -> None:
        self._slowness[number] = factor
        instance = self._instances.get(f"instance-{number}")
        if instance is not None:
            instance.slow_down(self.now, factor)
            self._foresee_instance(instance)

    # ------------------------------------------------------------------ the end

    def _result(self, reason: str) -> SimulationResult:
        for instance in self._instances.values():
            instance.settle(self.now)
            held = instance.stop()
            self._measures.left(instance, self.now)
            self._store.left(t.trajectory_id for t in held)
        self._instances.clear()
        self._measures.tokens["in_flight"] += sum(t.response for t in self._store.living())
        self._watch.ended()
        return self._measures.result(reason, self.now)


def _or(version: int | None, default: int) -> int:
    return default if version is None else version
