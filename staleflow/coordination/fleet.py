"""The rollout instances as `Control` knows them, and the unacknowledged commands to each.

Invariants: sequence numbers to one incarnation are consecutive from 1; a command is outstanding from its
order until a report acknowledges it, or shows that its trajectory has already left, so the command will find
nothing; a new incarnation starts with none. Views are rebuilt on reading, and only for instances that
changed, so the cost of an order does not depend on the number outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from staleflow.coordination.actions import Abort, Command, Interrupt
from staleflow.coordination.events import InstanceJoined, InstanceReport
from staleflow.coordination.snapshot import InstanceSnapshot, InstanceView
from staleflow.errors import ProtocolError


class _Instance:
    __slots__ = ("next_seq", "outstanding", "resident", "snapshot")

    def __init__(self, snapshot: InstanceSnapshot) -> None:
        self.snapshot = snapshot
        self.next_seq = 1
        self.outstanding: deque[Command] = deque()
        self.resident: dict[str, None] = {}


class Fleet:
    """Instances by name, one incarnation each."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}
        self._views: dict[str, InstanceView] = {}
        self._changed: dict[str, None] = {}
        """Instances whose view is out of date; a dict, because a set has no order."""

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, instance: object) -> bool:
        return instance in self._instances

    def names(self) -> tuple[str, ...]:
        """Names of the instances that are up, in order of joining."""
        return tuple(self._instances)

    def snapshot(self, instance: str) -> InstanceSnapshot:
        """The instance as it last reported itself."""
        return self._instances[instance].snapshot

    def resident(self, instance: str) -> tuple[str, ...]:
        """Trajectories ordered to the instance that have not left it."""
        return tuple(self._instances[instance].resident)

    def is_current(self, instance: str, incarnation: int) -> bool:
        """Whether this incarnation is the one that is up."""
        entry = self._instances.get(instance)
        return entry is not None and entry.snapshot.incarnation == incarnation

    def join(self, event: InstanceJoined) -> None:
        """Add an incarnation; the caller has removed any earlier one."""
        if event.instance in self._instances:
            raise ProtocolError(f"instance {event.instance} joined while another incarnation of it is up")
        self._instances[event.instance] = _Instance(
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
        """Forget an instance and its outstanding commands; returns the trajectories it had."""
        self._views.pop(instance, None)
        self._changed.pop(instance, None)
        return tuple(self._instances.pop(instance).resident)

    def next_seq(self, instance: str) -> int:
        """Sequence number of the next command to the instance."""
        return self._instances[instance].next_seq

    def order(self, command: Command) -> None:
        """Record a command as sent."""
        entry = self._instances[command.instance]
        if command.seq != entry.next_seq or command.incarnation != entry.snapshot.incarnation:
            raise ProtocolError(f"command {command} is not the next command of {command.instance}")
        entry.next_seq += 1
        entry.outstanding.append(command)
        self._changed[command.instance] = None

    def place(self, instance: str, trajectory_id: str) -> None:
        """A trajectory was ordered to the instance."""
        self._instances[instance].resident[trajectory_id] = None

    def remove(self, instance: str, trajectory_id: str) -> None:
        """A trajectory left the instance."""
        entry = self._instances.get(instance)
        if entry is not None:
            entry.resident.pop(trajectory_id, None)

    def report(self, report: InstanceReport) -> tuple[Command, ...]:
        """Record a report; returns the commands that it acknowledges."""
        entry = self._instances[report.instance]
        known = entry.snapshot
        entry.snapshot = InstanceSnapshot(
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
        outstanding, acked_seq = entry.outstanding, report.acked_seq
        while outstanding and outstanding[0].seq <= acked_seq:
            acknowledged.append(outstanding.popleft())
        if outstanding and (report.finished or report.rejections):
            self._drop_idle(entry, report)
        self._changed[report.instance] = None
        return tuple(acknowledged)

    def _drop_idle(self, entry: _Instance, report: InstanceReport) -> None:
        """Forget commands that will find nothing: the report no longer counts their trajectories."""
        gone = {t.trajectory_id for t in report.finished} | {r.trajectory_id for r in report.rejections}
        if any(_takes_away(command, gone) for command in entry.outstanding):
            entry.outstanding = deque(c for c in entry.outstanding if not _takes_away(c, gone))

    def views(self) -> Mapping[str, InstanceView]:
        """All instances for the coordinator, in order of joining; shared, and valid until the next change."""
        for instance in self._changed:
            entry = self._instances[instance]
            self._views[instance] = InstanceView(entry.snapshot, tuple(entry.outstanding), entry.next_seq)
        self._changed.clear()
        return self._views


def _takes_away(command: Command, gone: AbstractSet[str | None]) -> bool:
    return isinstance(command, Interrupt | Abort) and command.trajectory_id in gone
