"""The instances of a simulated cluster: commands to them, what happens on them, reports from them.

Invariants: an instance's next change is on the agenda once for each plan that it makes, and only the last one
counts; a report leaves at once if it may change a decision. That trajectories were taken in as ordered does
not: it is told with the next report, at the latest with the lengths of what is running.
"""

from __future__ import annotations

from collections.abc import Callable

from staleflow.coordination.actions import Command
from staleflow.coordination.events import Event, InstanceJoined, InstanceLost, InstanceReport, Reported
from staleflow.simulation.event_queue import Agenda
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.settings import ClusterSettings, Outage
from staleflow.simulation.stats import Measures
from staleflow.simulation.store import TrajectoryStore
from staleflow.simulation.watch import Watch


class SimulatedFleet:
    """Instances by name. `tell` takes events for Control."""

    def __init__(
        self,
        *,
        settings: ClusterSettings,
        agenda: Agenda,
        store: TrajectoryStore,
        measures: Measures,
        watch: Watch,
        tell: Callable[[Event], None],
    ) -> None:
        self.version = 0
        """Newest weights that can be pulled."""
        self._settings = settings
        self._agenda = agenda
        self._store = store
        self._measures = measures
        self._watch = watch
        self._tell = tell
        self._instances: dict[str, SimulatedInstance] = {}
        self._ordered: dict[str, SimulatedInstance] = {}
        """Those with commands that their plan does not know yet."""
        self._progress_foreseen = False
        self._slowness = dict.fromkeys(range(settings.instances), 1.0)

    def start(self) -> None:
        """All instances come up; what the settings say will befall them is foreseen."""
        for number in range(self._settings.instances):
            self._join(number, 1)
        for outage in self._settings.outages:
            self._agenda.foresee(outage.at, self._die, outage)
        for slowdown in self._settings.slowdowns:
            self._agenda.foresee(slowdown.at, self._slow_down, slowdown.instance, slowdown.factor)

    def generated(self) -> int:
        """Tokens of the incarnations that are up."""
        return sum(instance.generated for instance in self._instances.values())

    def stop(self) -> None:
        """The run is over: instances tell nothing any more, and hold nothing."""
        for instance in self._instances.values():
            instance.settle(self._agenda.now)
            held = instance.stop()
            self._measures.left(instance, self._agenda.now)
            self._store.left(t.trajectory_id for t in held)
        self._instances.clear()

    # ------------------------------------------------------------------ commands

    def send(self, command: Command) -> None:
        """A command goes out; `replan` when the last of this moment has."""
        instance = self._instances.get(command.instance)
        if instance is not None and instance.incarnation == command.incarnation:
            instance.deliver(self._agenda.now + self._settings.command_s, command)
            self._ordered[command.instance] = instance

    def replan(self) -> None:
        """Those that commands went to find out what they do next."""
        if self._ordered:
            for instance in self._ordered.values():
                instance.replan()
                self._foresee(instance)
            self._ordered.clear()

    # ------------------------------------------------------------------ what happens

    def _foresee(self, instance: SimulatedInstance) -> None:
        if instance.next_event is not None and instance.foreseen != instance.plan:
            instance.foreseen = instance.plan
            self._agenda.foresee(instance.next_event, self._advance, instance, instance.plan)
        if not self._progress_foreseen and instance.running:
            self._progress_foreseen = True
            self._agenda.foresee(self._agenda.now + self._settings.progress_interval_s, self._progress)

    def _advance(self, instance: SimulatedInstance, plan: int) -> None:
        if plan != instance.plan:
            return
        instance.advance()
        self._foresee(instance)
        if instance.has_urgent_news and instance.at <= self._agenda.now:  # while it pulls, it says nothing
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
            began=self._agenda.now,
            slowness=self._slowness[number],
        )
        event = InstanceJoined(
            instance=name,
            incarnation=incarnation,
            version=self.version,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
        )
        self._watch.joined(event)
        self._tell(event)

    def _newest(self) -> int:
        return self.version

    def _die(self, outage: Outage) -> None:
        name, now = f"instance-{outage.instance}", self._agenda.now
        instance = self._instances.pop(name, None)
        if instance is None:
            return
        instance.settle(now)
        if instance.has_news and instance.at <= now:
            self._report(instance)
        held = instance.stop()
        self._measures.tokens["lost"] += sum(t.cut(t.reported) for t in held)
        self._measures.left(instance, now)
        lengths = tuple((t.trajectory_id, t.base) for t in held)
        self._store.left(t.trajectory_id for t in held)
        event = InstanceLost(
            instance=name, incarnation=instance.incarnation, lengths=lengths, reason="scripted outage"
        )
        self._agenda.foresee(now + self._settings.report_s, self._lost, event)
        if outage.down_s is not None:
            back = now + max(outage.down_s, self._settings.report_s)
            self._agenda.foresee(back, self._join, outage.instance, instance.incarnation + 1)

    def _lost(self, event: InstanceLost) -> None:
        self._watch.lost(event)
        self._tell(event)

    def _slow_down(self, number: int, factor: float) -> None:
        self._slowness[number] = factor
        instance = self._instances.get(f"instance-{number}")
        if instance is not None:
            instance.slow_down(self._agenda.now, factor)
            self._foresee(instance)

    # ------------------------------------------------------------------ reports

    def _progress(self) -> None:
        """All instances tell the lengths of what they are at."""
        self._progress_foreseen = False
        now = self._agenda.now
        for instance in list(self._instances.values()):
            instance.settle(now)
            if instance.running and instance.at <= now:
                self._report(instance, progress=True)
            self._foresee(instance)

    def _report(self, instance: SimulatedInstance, *, progress: bool = False) -> None:
        report = instance.take_report(progress=progress)
        if self._store.leaving:
            self._store.left(report.aborted)
            self._store.left(t.trajectory_id for t in (*report.finished, *report.interrupted))
        if self._settings.report_s > 0:
            self._agenda.foresee(self._agenda.now + self._settings.report_s, self._reported, report)
        else:
            self._reported(report)

    def _reported(self, report: InstanceReport) -> None:
        self._measures.reported(report)
        self._watch.reported(report)
        self._tell(Reported(report))
