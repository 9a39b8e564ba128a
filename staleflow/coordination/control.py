"""`Control`: the single writer of staleness buffer, lifecycle and ledger. Events and time in, actions out.

Invariants
----------
- A Route leaves only with its admission applied to the buffer in the same call; a Route whose admission
  the buffer refuses is dropped and the trajectory stays pending.
- Training step c is handed out when the trainer has weights c and consume is legal, never otherwise,
  so V + η >= c holds for all that is trained.
- Every transition of the protocol appends one ledger record; sequence numbers have no gap.

Flow::

    prompt source --DrawGroups/GroupsDrawn--> pending --Route--> running --Reported--> generated
        --Score/Rewarded--> rewarded --(group complete)--> filter --> occupied --Train--> trainer --Pushed-->

Backpressure: groups are drawn only as far as the buffer can place them under the newest version.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.coordination.actions import Action, GiveUp, Resample, Score, Send, Truncate
from staleflow.coordination.batches import Batches, BatchSettings, GroupFilter
from staleflow.coordination.commands import Abort, Command, Interrupt, Route, renumbered
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.events import (
    Ended,
    Event,
    Given,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrainerFree,
    WaitingExternal,
)
from staleflow.coordination.fleet import Fleet
from staleflow.coordination.length_statistics import LengthStatistics
from staleflow.coordination.online_costs import OnlineCosts
from staleflow.coordination.outbox import Outbox
from staleflow.coordination.reports import InstanceReport, Rejection, TrajectoryReport
from staleflow.coordination.snapshot import Resident, Snapshot
from staleflow.coordination.stragglers import StragglerRule
from staleflow.coordination.timeouts import Deadlines, ProgressWatch
from staleflow.coordination.trajectory_table import Member, TrajectoryTable
from staleflow.errors import ProtocolError
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import EndReason, Lower, Record, Reserve

_URGENT = (GroupsDrawn, InstanceJoined, InstanceLost, Pushed, StopRequested, TrainerFree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long, and how often, a trajectory may fail to move."""

    stall_after_s: float = 60.0
    """A running trajectory without a new token for this long is taken back and started again."""
    max_retries: int = 3
    """Failures of one trajectory before it is given up and masked."""


class Control:
    """See the module's docstring. `handle` for facts, `cycle` for decisions."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        coordinator: Coordinator,
        batches: BatchSettings,
        patience: Patience | None = None,
        stragglers: StragglerRule | None = None,
        expected_response: int = 64,
        group_filter: GroupFilter | None = None,
        costs: OnlineCosts | None = None,
        attempt: int = 0,
        next_seq: int = 0,
    ) -> None:
        """Start with an empty `buffer` whose next_buffer is the version that will be pushed first.

        `expected_response` is in tokens: the guess until responses have been seen. `group_filter` gets the
        raw rewards of a complete group's usable members; True releases the group. `costs` is fed with the
        instances' reports; default: the start values, refined.
        """
        patience = patience or Patience()
        self.buffer = buffer
        self.population = TrajectoryTable()
        self.fleet = Fleet()
        self._outbox = Outbox(attempt=attempt, next_seq=next_seq)
        self.batches = Batches(
            buffer=buffer,
            population=self.population,
            outbox=self._outbox,
            settings=batches,
            group_filter=group_filter,
            abort=self._order_abort,
        )
        self._coordinator = coordinator
        self.costs = costs or OnlineCosts(START_VALUES)
        self._patience = patience
        self._stragglers = stragglers or StragglerRule()
        self._now = 0.0
        self.wake_at: float | None = None
        """When the next cycle is due though nothing happens before; None: only an event changes anything."""
        self.urgent = False
        """Something stands still until the next cycle, which should come at once."""
        self._lengths = LengthStatistics(expected_response)
        self._running = ProgressWatch(patience.stall_after_s)
        self._external = Deadlines()
        self._group_members = batches.group_size

    # ------------------------------------------------------------------ the two entries

    def handle(self, event: Event) -> list[Action]:
        """Take a fact in. Raises ProtocolError when it contradicts what is known."""
        if isinstance(event, Reported):  # most events are; none of them lets training go on by itself
            self._on_report(event.report)
            return self._outbox.take()
        if isinstance(event, Rewarded):
            if self._on_rewarded(event):
                self.batches.advance()
            return self._outbox.take()
        self.urgent = self.urgent or isinstance(event, _URGENT)
        match event:
            case GroupsDrawn(groups=groups):
                self.batches.drawn()
                for drawn in groups:
                    self.population.add(drawn)
                    self._group_members = len(drawn.members)
                    self._lengths.drawn(drawn.prompt_length)
            case SourceExhausted():
                self.batches.drawn()
                self.batches.exhausted = True
            case InstanceJoined():
                self.fleet.join(event)
            case InstanceLost():
                self._on_lost(event)
            case Given(trajectory_id=trajectory_id, length=length):
                self._on_given(trajectory_id, length)
            case WaitingExternal(trajectory_id=trajectory_id, limit_s=limit_s):
                self._on_waiting_external(trajectory_id, limit_s)
            case Ended(trajectory_id=trajectory_id):
                self._on_ended(trajectory_id)
            case TrainedStep(record=record):
                self._outbox.record(record)
            case TrainerFree(version=version):
                self.batches.trainer_free(version)
            case Pushed(version=version):
                self.batches.pushed(version)
            case StopRequested():
                self.batches.stopping = True
        self.batches.advance()
        return self._outbox.take()

    def cycle(self, now: float) -> list[Action]:
        """Look after what is overdue, let the coordinator decide, and draw what can be placed.

        `now` is in seconds on any clock that does not go backwards.
        """
        self._now = now
        self.urgent = False
        if self.batches.finished is None:
            self._take_back_overdue()
            self._hurry_stragglers()
            decision = self._coordinator.step(self.snapshot())
            self.wake_at = decision.wake_at
            for command in decision.commands:
                self._issue(command)
            self.batches.draw()
            self.batches.advance()
        return self._outbox.take()

    def note(self, record: Record) -> list[Action]:
        """Append a record that is no transition: the run's start, or a resume."""
        self._outbox.record(record)
        return self._outbox.take()

    # ------------------------------------------------------------------ what others may look at

    @property
    def finished(self) -> EndReason | None:
        """Why the run is over; None while it goes on."""
        return self.batches.finished

    def snapshot(self) -> Snapshot:
        """The coordinator's view of this moment."""
        return Snapshot(
            costs=self.costs.model,
            now=self._now,
            next_buffer=self.buffer.next_buffer,
            newest_version=self.batches.newest_version,
            counts=self.buffer.counts(),
            reservable=self.batches.reservable,
            spares_free=self.batches.spares_free,
            pending=self.population.pending,
            instances=self.fleet.views(),
            group_members=self._group_members,
            expected_growth=self._lengths.expected_growth,
            expected_held=self._lengths.expected_held,
            resident=self._residents,
        )

    def _residents(self, instance: str) -> tuple[Resident, ...]:
        """The trajectories of an instance, in the order of their Routes."""
        return tuple(
            Resident(
                trajectory_id=member.trajectory_id,
                group_id=member.group_id,
                group_version=version,
                length=member.length,
                response=member.length - member.prompt_length,
                routed_at=member.routed_at,
                routed_length=member.routed_length,
                fruitless=member.fruitless,
                leaving=member.leaving,
            )
            for member in map(self.population.member, self.fleet.resident(instance))
            if (version := self.population.group(member.group_id).version) is not None
        )

    # ------------------------------------------------------------------ commands

    def _issue(self, command: Command) -> None:
        if isinstance(command, Route) and not self._admit(command):
            return
        seq = self.fleet.next_seq(command.instance)
        if command.seq != seq:  # those behind a dropped Route close ranks: sequence numbers have no gap
            command = renumbered(command, seq)
        self.fleet.order(command)
        if isinstance(command, Route):
            member = self.population.member(command.trajectory_id)
            self.population.start(member, command.instance, command.seq)
            member.fruitless = member.fruitless + 1 if member.length == member.routed_length else 0
            member.routed_at, member.routed_length = self._now, member.length
            self.fleet.place(command.instance, command.trajectory_id)
            self._running.touch(command.trajectory_id, self._now)
        elif isinstance(command, Interrupt):
            self.population.member(command.trajectory_id).leaving = True
        self._outbox.put(Send(command))

    def _admit(self, route: Route) -> bool:
        group, admission = route.group_id, route.admission
        if admission is None:
            reserved = self.population.group(group).version
            return reserved is not None and reserved <= route.min_version
        version = admission.version
        try:
            if admission.kind == "reserve":
                self.buffer.reserve(group, version, spare=admission.spare)
                self._outbox.record(Reserve(group=group, version=version, spare=admission.spare))
            else:
                self.buffer.lower(group, version)
                self._outbox.record(Lower(group=group, version=version))
        except ProtocolError:
            return False
        self.population.set_version(group, version)
        return True

    def _order_abort(self, member: Member, reason: str) -> None:
        instance = member.instance
        if instance is None or instance not in self.fleet:
            return
        held = self._held(member, instance)
        self._running.forget(member.trajectory_id)
        self.fleet.remove(instance, member.trajectory_id)
        if member.leaving:
            return  # the Interrupt on its way takes it out; two commands would free its room twice
        command = Abort(
            instance=instance,
            incarnation=self.fleet.snapshot(instance).incarnation,
            seq=self.fleet.next_seq(instance),
            trajectory_id=member.trajectory_id,
            length=held,
            reason=reason,
        )
        self.fleet.order(command)
        self._outbox.put(Send(command))

    def _held(self, member: Member, instance: str) -> int:
        """Tokens of a trajectory in the instance's KV cache: 0 for one that only waits inside it, as those do
        that came last of what the instance has told of.
        """
        waiting, told = self.fleet.snapshot(instance).waiting, self.fleet.snapshot(instance).acked_seq
        if not waiting or member.route_seq > told:
            return member.length
        there = map(self.population.member, self.fleet.resident(instance))
        known = [m.trajectory_id for m in there if m.route_seq <= told]
        return 0 if member.trajectory_id in known[-waiting:] else member.length

    # ------------------------------------------------------------------ instances

    def _on_report(self, report: InstanceReport) -> None:
        if not self.fleet.is_current(report.instance, report.incarnation):
            return
        self.costs.observe(report)
        acknowledged = self.fleet.report(report)
        if report.running + report.waiting == 0 or report.interrupted:
            self.urgent = True
        if report.lengths:
            self._running.touch_all(self.population.grow(report.instance, report.lengths), self._now)
        for finished in report.finished:
            self._on_finished(finished, report.instance)
        for interrupted in report.interrupted:
            member = self._resident(interrupted.trajectory_id, report.instance)
            if member is not None:
                self._check_version(interrupted, member)
                self._return_to_pending(member, interrupted.length)
        for rejection in report.rejections:
            self._on_rejection(rejection, report.instance)
        for command in acknowledged:
            if isinstance(command, Interrupt):
                self._on_interrupt_applied(command)

    def _on_finished(self, report: TrajectoryReport, instance: str) -> None:
        member = self._resident(report.trajectory_id, instance)
        if member is None:
            return
        self._check_version(report, member)
        self.fleet.remove(instance, member.trajectory_id)
        self._running.forget(member.trajectory_id)
        self.population.to_generated(member, report.length)
        self._lengths.finished(report.length - member.prompt_length)
        self._outbox.put(Score(member.trajectory_id))

    def _on_rejection(self, rejection: Rejection, instance: str) -> None:
        if rejection.trajectory_id is None:
            return
        member = self._resident(rejection.trajectory_id, instance)
        if member is not None and member.route_seq == rejection.seq:
            failure = "" if rejection.stale_version else rejection.reason
            self._return_to_pending(member, member.length, failure=failure)

    def _on_interrupt_applied(self, command: Interrupt) -> None:
        """An Interrupt that found nothing: the instance has lost the trajectory."""
        member = self._resident(command.trajectory_id, command.instance)
        if member is not None and member.route_seq < command.seq:
            self._return_to_pending(member, member.length, failure=f"{command.instance} lost it")

    def _on_lost(self, event: InstanceLost) -> None:
        if not self.fleet.is_current(event.instance, event.incarnation):
            return
        lengths = dict(event.lengths)
        failure = f"{event.instance} was lost: {event.reason}"
        for trajectory_id in self.fleet.leave(event.instance):
            member = self._resident(trajectory_id, event.instance)
            if member is not None:
                length = lengths.get(trajectory_id, member.length)
                self._return_to_pending(member, length, failure=failure)

    def _resident(self, trajectory_id: str, instance: str) -> Member | None:
        """The trajectory if it is still RUNNING there; None when it was released meanwhile."""
        member = self.population.find(trajectory_id)
        return member if member is not None and member.instance == instance else None

    def _check_version(self, report: TrajectoryReport, member: Member) -> None:
        version = self.population.group(member.group_id).version
        if report.min_version is not None and (version is None or report.min_version < version):
            raise ProtocolError(
                f"trajectory {member.trajectory_id} came back with tokens of version {report.min_version}, "
                f"older than its reservation at {version}"
            )

    def _return_to_pending(self, member: Member, length: int, failure: str = "") -> None:
        failure = failure or member.failure
        if member.instance is not None:
            self.fleet.remove(member.instance, member.trajectory_id)
        self._running.forget(member.trajectory_id)
        self.population.to_pending(member, length)
        if failure:
            member.failure = ""
            member.retries += 1
            if member.retries > self._patience.max_retries:
                self._give_up(member, failure)

    # ------------------------------------------------------------------ what is overdue

    def _take_back_overdue(self) -> None:
        for trajectory_id in self._running.overdue(self._now):
            member = self.population.member(trajectory_id)
            instance = member.instance
            if instance is None or member.leaving:
                continue
            if self.fleet.snapshot(instance).waiting > 0:
                self._running.touch(trajectory_id, self._now)  # it may just be queued there
                continue
            member.failure = f"no new token for {self._patience.stall_after_s:g} s on {instance}"
            self._interrupt(member, instance, member.failure)
        for trajectory_id in self._external.expired(self._now):
            waiting = self.population.find(trajectory_id)
            if waiting is not None:
                self._give_up(waiting, "its environment did not answer in time")

    def _interrupt(self, member: Member, instance: str, reason: str) -> None:
        self._issue(
            Interrupt(
                instance=instance,
                incarnation=self.fleet.snapshot(instance).incarnation,
                seq=self.fleet.next_seq(instance),
                trajectory_id=member.trajectory_id,
                length=self._held(member, instance),
                reason=reason,
            )
        )

    def _hurry_stragglers(self) -> None:
        """Act on the last ones that training waits for, before they are routed again."""
        rule = self._stragglers
        for member in self.batches.stragglers(rule, self._lengths.expected_growth):
            why = f"straggler of step {self.buffer.next_buffer}: {rule.action}"
            if rule.action == "retry":
                self._resample(member, why)
            elif member.instance is not None:
                self._interrupt(member, member.instance, why)  # it is cut when it has come back
            else:
                self.population.to_generated(member, member.length)
                self._outbox.put(Truncate(trajectory_id=member.trajectory_id, reason=why))
                self._outbox.put(Score(member.trajectory_id))

    def _resample(self, member: Member, why: str) -> None:
        new_id = f"{member.trajectory_id}-r{member.resampled + 1}"
        self._order_abort(member, why)
        self.population.resample(member, new_id)
        self._outbox.put(Resample(trajectory_id=member.trajectory_id, new_id=new_id, reason=why))

    def _give_up(self, member: Member, why: str) -> None:
        self.population.to_generated(member, member.length)
        self._outbox.put(GiveUp(trajectory_id=member.trajectory_id, reason=why))
        self._outbox.put(Score(member.trajectory_id))

    # ------------------------------------------------------------------ environment and reward

    def _on_given(self, trajectory_id: str, length: int) -> None:
        member = self.population.find(trajectory_id)
        if member is not None:
            self._external.forget(trajectory_id)
            self.population.to_pending(member, length)

    def _on_waiting_external(self, trajectory_id: str, limit_s: float) -> None:
        member = self.population.find(trajectory_id)
        if member is not None:
            self.population.to_waiting_external(member)
            self._external.set(trajectory_id, self._now + limit_s)

    def _on_ended(self, trajectory_id: str) -> None:
        member = self.population.find(trajectory_id)
        if member is not None:
            self._external.forget(trajectory_id)
            self.population.to_generated(member, member.length)

    def _on_rewarded(self, event: Rewarded) -> bool:
        member = self.population.find(event.trajectory_id)
        return member is not None and self.batches.rewarded(member, event)
