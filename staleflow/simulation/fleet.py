"""The instances of a simulated cluster: commands to them, what happens on them, reports from them.

Invariants: an instance's next change is queued once for each plan that it makes, and only the last one
counts; a report leaves at once if it may change a decision. That trajectories were taken in as ordered does
not: the next report says so, at the latest the one with the lengths of what is running.
"""

from __future__ import annotations

from collections.abc import Callable

from staleflow.coordination.actions import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.instance_update import InstanceUpdate
from staleflow.simulation.event_queue import EventQueue
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.settings import ClusterSettings, Outage
from staleflow.simulation.stats import SimulationStats
from staleflow.simulation.store import SimulatedStore
from staleflow.telemetry.events import InstanceDown

FleetMessage = InstanceJoined | InstanceDown | InstanceUpdate


class SimulatedFleet:
    """Instances by name. `tell` takes messages for the run loop."""

    def __init__(
        self,
        *,
        settings: ClusterSettings,
        queue: EventQueue,
        store: SimulatedStore,
        stats: SimulationStats,
        tell: Callable[[FleetMessage], None],
    ) -> None:
        self.version = 0
        """Newest weights that can be pulled."""
        self._settings = settings
        self._queue = queue
        self._store = store
        self._stats = stats
        self._tell = tell
        self._instances: dict[str, SimulatedInstance] = {}
        self._ordered: dict[str, SimulatedInstance] = {}
        """Those with commands that their plan does not know yet."""
        self._progress_scheduled = False
        self._slowness = dict.fromkeys(range(settings.instances), 1.0)

    def start(self) -> None:
        """All instances come up; the outages and slowdowns of the settings are scheduled."""
        for number in range(self._settings.instances):
            self._join(number, 1)
        for outage in self._settings.outages:
            self._queue.schedule(outage.at, self._die, outage)
        for slowdown in self._settings.slowdowns:
            self._queue.schedule(slowdown.at, self._slow_down, slowdown.instance, slowdown.factor)

    def generated(self) -> int:
        """Tokens of the incarnations that are up."""
        return sum(instance.generated for instance in self._instances.values())

    def stop(self) -> None:
        """The run is over: instances report nothing any more, and hold nothing."""
        for instance in self._instances.values():
            instance.settle(self._queue.time)
            held = instance.stop()
            self._stats.left(instance, self._queue.time)
            self._store.left(t.trajectory_id for t in held)
        self._instances.clear()

    # ------------------------------------------------------------------ commands

    def send(self, command: Command) -> None:
        """A command goes out; call `replan` after the last of this moment."""
        self._stats.commands[type(command)] += 1
        instance = self._instances.get(command.instance)
        if instance is not None and instance.incarnation == command.incarnation:
            instance.deliver(self._queue.time + self._settings.command_s, command)
            self._ordered[command.instance] = instance

    def replan(self) -> None:
        """Instances with new commands plan what they do next."""
        if self._ordered:
            for instance in self._ordered.values():
                instance.replan()
                self._schedule(instance)
            self._ordered.clear()

    # ------------------------------------------------------------------ what happens

    def _schedule(self, instance: SimulatedInstance) -> None:
        if instance.next_event is not None and instance.scheduled != instance.plan:
            instance.scheduled = instance.plan
            self._queue.schedule(instance.next_event, self._advance, instance, instance.plan)
        if not self._progress_scheduled and instance.running:
            self._progress_scheduled = True
            self._queue.schedule(self._queue.time + self._settings.progress_interval_s, self._progress)

    def _advance(self, instance: SimulatedInstance, plan: int) -> None:
        if plan != instance.plan:
            return
        instance.advance()
        self._schedule(instance)
        if instance.has_urgent_news and instance.at <= self._queue.time:  # while it pulls, it says nothing
            self._report(instance)

    def _join(self, number: int, incarnation: int) -> None:
        settings, name = self._settings, f"instance-{number}"
        self._instances[name] = SimulatedInstance(
            instance=name,
            incarnation=incarnation,
            version=self.version,
            costs=settings.costs,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
            on_pull=settings.on_pull,
            find=self._store.find,
            newest=self._newest,
            began=self._queue.time,
            slowness=self._slowness[number],
        )
        event = InstanceJoined(
            instance=name,
            incarnation=incarnation,
            version=self.version,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
        )
        self._tell(event)

    def _newest(self) -> int:
        return self.version

    def _die(self, outage: Outage) -> None:
        name, now = f"instance-{outage.instance}", self._queue.time
        instance = self._instances.pop(name, None)
        if instance is None:
            return
        instance.settle(now)
        if instance.has_news and instance.at <= now:
            self._report(instance)
        held = instance.stop()
        self._stats.tokens["lost"] += sum(t.cut(t.reported) for t in held)
        self._stats.left(instance, now)
        self._store.lost([t.trajectory_id for t in held])
        down = InstanceDown(instance=name, incarnation=instance.incarnation, reason="scripted outage")
        self._queue.schedule(now + self._settings.report_s, self._tell, down)
        if outage.down_s is not None:
            back = now + max(outage.down_s, self._settings.report_s)
            self._queue.schedule(back, self._join, outage.instance, instance.incarnation + 1)

    def _slow_down(self, number: int, factor: float) -> None:
        self._slowness[number] = factor
        instance = self._instances.get(f"instance-{number}")
        if instance is not None:
            instance.slow_down(self._queue.time, factor)
            self._schedule(instance)

    # ------------------------------------------------------------------ reports

    def _progress(self) -> None:
        """All instances report the lengths of what they decode."""
        self._progress_scheduled = False
        now = self._queue.time
        for instance in list(self._instances.values()):
            instance.settle(now)
            if instance.running and instance.at <= now:
                self._report(instance, progress=True)
            self._schedule(instance)

    def _report(self, instance: SimulatedInstance, *, progress: bool = False) -> None:
        report = instance.take_report(progress=progress)
        self._stats.reported(report)
        update = InstanceUpdate(report, ())
        if self._store.leaving:
            self._store.left(report.aborted)
            self._store.left(t.trajectory_id for t in (*report.finished, *report.interrupted))
        if self._settings.report_s > 0:
            self._queue.schedule(self._queue.time + self._settings.report_s, self._tell, update)
        else:
            self._tell(update)
