"""The rollout instances as `Control` knows them, and the commands on their way to each.

Invariants: sequence numbers to one incarnation are consecutive from 1; a command is outstanding from its
order until the report that acknowledges it, or that tells that its trajectory has left by itself, so that
it will find nothing; a new incarnation starts with none. Views are made anew when somebody looks, and only of
instances that changed: an order costs the same however many are outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from staleflow.coordination.commands import Abort, Command, Interrupt
from staleflow.coordination.events import InstanceJoined
from staleflow.coordination.reports import InstanceReport
from staleflow.coordination.snapshot import InstanceSnapshot, InstanceView
from staleflow.errors import ProtocolError


class _Member:
    __slots__ = ("next_seq", "outstanding", "resident", "snapshot")

    def __init__(self, snapshot: InstanceSnapshot) -> None:
        self.snapshot = snapshot
        self.next_seq = 1
        self.outstanding: deque[Command] = deque()
        self.resident: dict[str, None] = {}


class Fleet:
    """Instances by name, one incarnation each."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._views: dict[str, InstanceView] = {}
        self._changed: dict[str, None] = {}
        """Instances whose view is out of date; a dict, for a set has no order."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, instance: object) -> bool:
        return instance in self._members

    def names(self) -> tuple[str, ...]:
        """Instances that are up, in order of joining."""
        return tuple(self._members)

    def snapshot(self, instance: str) -> InstanceSnapshot:
        """The instance as it last reported itself."""
        return self._members[instance].snapshot

    def resident(self, instance: str) -> tuple[str, ...]:
        """Trajectories ordered to the instance that have not left it."""
        return tuple(self._members[instance].resident)

    def is_current(self, instance: str, incarnation: int) -> bool:
        """Whether this incarnation is the one that is up."""
        member = self._members.get(instance)
        return member is not None and member.snapshot.incarnation == incarnation

    def join(self, event: InstanceJoined) -> None:
        """Take an incarnation in; the caller has removed an earlier one."""
        if event.instance in self._members:
            raise ProtocolError(f"instance {event.instance} joined while an incarnation of it is up")
        self._members[event.instance] = _Member(
            InstanceSnapshot(
                instance=event.instance,
                incarnation=event.incarnation,
                revision=0,
                version=event.version,
                running=0,
                waiting=0,
                kv_tokens=0,
                kv_capacity=event.kv_capacity,
                max_running=event.max_running,
                acked_seq=0,
            )
        )
        self._changed[event.instance] = None

    def leave(self, instance: str) -> tuple[str, ...]:
        """Forget an instance and its outstanding commands; returns the trajectories that were there."""
        self._views.pop(instance, None)
        self._changed.pop(instance, None)
        return tuple(self._members.pop(instance).resident)

    def next_seq(self, instance: str) -> int:
        """Sequence number of the next command to the instance."""
        return self._members[instance].next_seq

    def order(self, command: Command) -> None:
        """Note a command as sent."""
        member = self._members[command.instance]
        if command.seq != member.next_seq or command.incarnation != member.snapshot.incarnation:
            raise ProtocolError(f"command {command} is not the next one of {command.instance}")
        member.next_seq += 1
        member.outstanding.append(command)
        self._changed[command.instance] = None

    def place(self, instance: str, trajectory_id: str) -> None:
        """A trajectory was ordered to the instance."""
        self._members[instance].resident[trajectory_id] = None

    def remove(self, instance: str, trajectory_id: str) -> None:
        """A trajectory left the instance."""
        member = self._members.get(instance)
        if member is not None:
            member.resident.pop(trajectory_id, None)

    def report(self, report: InstanceReport) -> tuple[Command, ...]:
        """Take a report in; returns the commands that it acknowledges."""
        member = self._members[report.instance]
        known = member.snapshot
        member.snapshot = InstanceSnapshot(
            known.instance,
            known.incarnation,
            report.revision,
            report.version,
            report.running,
            report.waiting,
            report.kv_tokens,
            report.kv_capacity or known.kv_capacity,
            known.max_running,
            report.acked_seq,
            report.generated_tokens,
            report.busy_seconds,
        )
        acknowledged: list[Command] = []
        outstanding, acked_seq = member.outstanding, report.acked_seq
        while outstanding and outstanding[0].seq <= acked_seq:
            acknowledged.append(outstanding.popleft())
        if outstanding and (report.finished or report.rejections):
            self._drop_idle(member, report)
        self._changed[report.instance] = None
        return tuple(acknowledged)

    def _drop_idle(self, member: _Member, report: InstanceReport) -> None:
        """Forget commands that will find nothing: what they take away is missing in the report already."""
        gone = {t.trajectory_id for t in report.finished} | {r.trajectory_id for r in report.rejections}
        if any(_takes_away(command, gone) for command in member.outstanding):
            member.outstanding = deque(c for c in member.outstanding if not _takes_away(c, gone))

    def views(self) -> Mapping[str, InstanceView]:
        """What the coordinator sees, in order of joining; shared, and good until the next change."""
        for instance in self._changed:
            member = self._members[instance]
            self._views[instance] = InstanceView(member.snapshot, tuple(member.outstanding), member.next_seq)
        self._changed.clear()
        return self._views


def _takes_away(command: Command, gone: AbstractSet[str | None]) -> bool:
    return isinstance(command, Interrupt | Abort) and command.trajectory_id in gone
