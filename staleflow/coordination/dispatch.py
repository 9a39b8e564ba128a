"""Trajectories on their way to instances and back: commands out, reports and losses in.

Invariants
----------
- A Route leaves only with its admission applied to the buffer in the same call. If the buffer refuses the
  admission, the Route is dropped and the trajectory stays pending.
- A trajectory leaves its instance by a report, a loss or an Abort, and returns to pending with the tokens
  that were reported; after more than `max_retries` failures it is given up and scored as unusable.
- No trajectory continues with tokens older than its group's reservation: that raises ProtocolError.
"""

from __future__ import annotations

from staleflow.coordination.actions import (
    Abort,
    Command,
    GiveUp,
    Interrupt,
    Outbox,
    Resample,
    Route,
    Score,
    Send,
    Truncate,
    renumbered,
)
from staleflow.coordination.estimates import LengthStatistics, OnlineCosts
from staleflow.coordination.events import InstanceLost, InstanceReport, Rejection, TrajectoryReport
from staleflow.coordination.fleet import Fleet
from staleflow.coordination.timing import CycleClock, ProgressWatch
from staleflow.coordination.trajectory_table import Member, TrajectoryTable
from staleflow.errors import ProtocolError
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Lower, Reserve


class Dispatch:
    """Sends commands, applies reports, and resamples, cuts or gives up single trajectories."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        trajectories: TrajectoryTable,
        fleet: Fleet,
        outbox: Outbox,
        clock: CycleClock,
        costs: OnlineCosts,
        lengths: LengthStatistics,
        stall_after_s: float,
        max_retries: int,
    ) -> None:
        self._buffer = buffer
        self._trajectories = trajectories
        self._fleet = fleet
        self._outbox = outbox
        self._clock = clock
        self._costs = costs
        self._lengths = lengths
        self._stall_after_s = stall_after_s
        self._max_retries = max_retries
        self._running = ProgressWatch(stall_after_s)

    # ------------------------------------------------------------------ commands

    def issue(self, command: Command) -> None:
        """Send a command, unless it is a Route whose admission the buffer refuses."""
        if isinstance(command, Route) and not self._admit(command):
            return
        seq = self._fleet.next_seq(command.instance)
        if command.seq != seq:  # an earlier Route was dropped: sequence numbers have no gap
            command = renumbered(command, seq)
        self._fleet.order(command)
        if isinstance(command, Route):
            now = self._clock.now
            member = self._trajectories.member(command.trajectory_id)
            self._trajectories.start(member, command.instance, command.seq)
            member.fruitless = member.fruitless + 1 if member.length == member.routed_length else 0
            member.routed_at, member.routed_length = now, member.length
            self._fleet.place(command.instance, command.trajectory_id)
            self._running.touch(command.trajectory_id)
        elif isinstance(command, Interrupt):
            self._trajectories.member(command.trajectory_id).leaving = True
        self._outbox.put(Send(command))

    def abort(self, member: Member, reason: str) -> None:
        """Abort a trajectory where it runs; does nothing if it is on no instance."""
        instance = member.instance
        if instance is None or instance not in self._fleet:
            return
        held = self._held(member, instance)
        self._running.forget(member.trajectory_id)
        self._fleet.remove(instance, member.trajectory_id)
        if member.leaving:
            return  # its Interrupt removes it; a second command would free its room twice
        command = Abort(
            instance=instance,
            incarnation=self._fleet.snapshot(instance).incarnation,
            seq=self._fleet.next_seq(instance),
            trajectory_id=member.trajectory_id,
            length=held,
            reason=reason,
        )
        self._fleet.order(command)
        self._outbox.put(Send(command))

    def interrupt(self, member: Member, instance: str, reason: str) -> None:
        """Take a trajectory back from the instance, with its tokens."""
        self.issue(
            Interrupt(
                instance=instance,
                incarnation=self._fleet.snapshot(instance).incarnation,
                seq=self._fleet.next_seq(instance),
                trajectory_id=member.trajectory_id,
                length=self._held(member, instance),
                reason=reason,
            )
        )

    def resample(self, member: Member, reason: str) -> None:
        """Abort a trajectory; another one of its prompt takes its place."""
        new_id = f"{member.trajectory_id}-r{member.resampled + 1}"
        self.abort(member, reason)
        self._trajectories.resample(member, new_id)
        self._outbox.put(Resample(trajectory_id=member.trajectory_id, new_id=new_id, reason=reason))

    def truncate(self, member: Member, reason: str) -> None:
        """Complete a trajectory as it is: now if it is pending, else interrupt it first."""
        if member.instance is not None:
            self.interrupt(member, member.instance, reason)
            return
        self._trajectories.to_generated(member, member.length)
        self._outbox.put(Truncate(trajectory_id=member.trajectory_id, reason=reason))
        self._outbox.put(Score(member.trajectory_id))

    def give_up(self, member: Member, reason: str) -> None:
        """Complete a trajectory as failed; scoring masks it."""
        self._trajectories.to_generated(member, member.length)
        self._outbox.put(GiveUp(trajectory_id=member.trajectory_id, reason=reason))
        self._outbox.put(Score(member.trajectory_id))

    @property
    def next_stall(self) -> float:
        """When the first running trajectory stalls unless it grows; inf: none can."""
        self._running.stamp(self._clock.now)
        return self._running.next_due

    def take_back_stalled(self) -> None:
        """Interrupt trajectories that have had no new token for too long."""
        now = self._clock.now
        for trajectory_id in self._running.overdue(now):
            member = self._trajectories.member(trajectory_id)
            instance = member.instance
            if instance is None or member.leaving:
                continue
            if self._fleet.snapshot(instance).waiting > 0:
                self._running.touch(trajectory_id)  # it may be waiting in the instance's own queue
                continue
            member.failure = f"no new token for {self._stall_after_s:g} s on {instance}"
            self.interrupt(member, instance, member.failure)

    def _admit(self, route: Route) -> bool:
        group, admission = route.group_id, route.admission
        if admission is None:
            reserved = self._trajectories.group(group).version
            return reserved is not None and reserved <= route.min_version
        version = admission.version
        try:
            if admission.kind == "reserve":
                self._buffer.reserve(group, version, spare=admission.spare)
                self._outbox.record(Reserve(group=group, version=version, spare=admission.spare))
            else:
                self._buffer.lower(group, version)
                self._outbox.record(Lower(group=group, version=version))
        except ProtocolError:
            return False
        self._trajectories.set_version(group, version)
        return True

    def _held(self, member: Member, instance: str) -> int:
        """Tokens of a trajectory in the instance's KV cache: 0 while it waits in the instance's own queue.

        The `waiting` that were routed last wait there, of those whose Route the instance has acknowledged.
        """
        snapshot = self._fleet.snapshot(instance)
        if not snapshot.waiting or member.route_seq > snapshot.acked_seq:
            return member.length
        residents = map(self._trajectories.member, self._fleet.resident(instance))
        known = [m.trajectory_id for m in residents if m.route_seq <= snapshot.acked_seq]
        return 0 if member.trajectory_id in known[-snapshot.waiting :] else member.length

    # ------------------------------------------------------------------ reports and losses

    def report(self, report: InstanceReport) -> None:
        """Apply a report. Reports of an earlier incarnation are ignored."""
        if not self._fleet.is_current(report.instance, report.incarnation):
            return
        self._costs.observe(report)
        acknowledged = self._fleet.report(report)
        if report.running + report.waiting == 0 or report.interrupted:
            self._clock.urgent = True
        if report.lengths:
            grown = self._trajectories.grow(report.instance, report.lengths)
            self._running.touch(*grown)
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

    def lost(self, event: InstanceLost) -> None:
        """Return the trajectories of a lost instance to pending."""
        if not self._fleet.is_current(event.instance, event.incarnation):
            return
        lengths = dict(event.lengths)
        failure = f"{event.instance} was lost: {event.reason}"
        for trajectory_id in self._fleet.leave(event.instance):
            member = self._resident(trajectory_id, event.instance)
            if member is not None:
                length = lengths.get(trajectory_id, member.length)
                self._return_to_pending(member, length, failure=failure)

    def _on_finished(self, report: TrajectoryReport, instance: str) -> None:
        member = self._resident(report.trajectory_id, instance)
        if member is None:
            return
        self._check_version(report, member)
        self._fleet.remove(instance, member.trajectory_id)
        self._running.forget(member.trajectory_id)
        self._trajectories.to_generated(member, report.length)
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
        """If the trajectory of an acknowledged Interrupt is still listed, the instance has lost it."""
        member = self._resident(command.trajectory_id, command.instance)
        if member is not None and member.route_seq < command.seq:
            self._return_to_pending(member, member.length, failure=f"{command.instance} lost it")

    def _resident(self, trajectory_id: str, instance: str) -> Member | None:
        """The trajectory if it is still RUNNING there; None if it was released."""
        member = self._trajectories.find(trajectory_id)
        return member if member is not None and member.instance == instance else None

    def _check_version(self, report: TrajectoryReport, member: Member) -> None:
        version = self._trajectories.group(member.group_id).version
        if report.min_version is not None and (version is None or report.min_version < version):
            raise ProtocolError(
                f"trajectory {member.trajectory_id} came back with tokens of version {report.min_version}, "
                f"older than its reservation at {version}"
            )

    def _return_to_pending(self, member: Member, length: int, failure: str = "") -> None:
        failure = failure or member.failure
        if member.instance is not None:
            self._fleet.remove(member.instance, member.trajectory_id)
        self._running.forget(member.trajectory_id)
        self._trajectories.to_pending(member, length)
        if failure:
            member.failure = ""
            member.retries += 1
            if member.retries > self._max_retries:
                self.give_up(member, failure)
