"""The speculative state: the snapshot with every unacknowledged command applied, and those of this cycle.

Invariant: no decision rests on a picture older than the last command, so no trajectory is ordered twice and
no capacity is given away twice. `apply` is the one place that says what a command does to an instance; the
simulator uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from staleflow.coordination.commands import Abort, Admission, Command, Interrupt, Pull, Route
from staleflow.coordination.pending import PendingTrajectory
from staleflow.coordination.snapshot import InstanceView, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceState:
    """What an instance will be once it has applied all that was ordered."""

    instance: str
    incarnation: int
    version: int
    resident: int
    """Trajectories there: running, waiting in the engine, and ordered."""
    waiting: int
    kv_tokens: int
    """Tokens in the KV cache, and those that the ordered trajectories bring."""
    kv_capacity: int
    max_running: int
    next_seq: int


def apply(state: InstanceState, command: Command) -> InstanceState:
    """The instance's state after `command`."""
    match command:
        case Route():
            return replace(
                state,
                resident=state.resident + 1,
                kv_tokens=state.kv_tokens + command.length,
                next_seq=command.seq + 1,
            )
        case Interrupt() | Abort():
            return replace(
                state,
                resident=max(0, state.resident - 1),
                kv_tokens=max(0, state.kv_tokens - command.length),
                next_seq=command.seq + 1,
            )
        case Pull():
            return replace(state, version=max(state.version, command.version), next_seq=command.seq + 1)


def speculate(view: InstanceView) -> InstanceState:
    """An instance's snapshot with its unacknowledged commands applied."""
    snapshot = view.snapshot
    state = InstanceState(
        instance=snapshot.instance,
        incarnation=snapshot.incarnation,
        version=snapshot.version,
        resident=snapshot.running + snapshot.waiting,
        waiting=snapshot.waiting,
        kv_tokens=snapshot.kv_tokens,
        kv_capacity=snapshot.kv_capacity,
        max_running=snapshot.max_running,
        next_seq=view.next_seq,
    )
    for command in view.outstanding:
        state = apply(state, command)
    return replace(state, next_seq=view.next_seq)


class SpeculativeState:
    """The working copy of one cycle. Strategies read it, and order through it."""

    def __init__(self, snapshot: Snapshot, instances: dict[str, InstanceState]) -> None:
        self.snapshot = snapshot
        self.instances = instances
        self.commands: list[Command] = []
        self._counts = snapshot.counts.copy()
        self._reservable = snapshot.reservable
        self._group_versions: dict[str, int] = {}
        self._ordered: set[str] = set()

    def is_ordered(self, trajectory_id: str) -> bool:
        """Whether this cycle has already ordered the trajectory."""
        return trajectory_id in self._ordered

    def group_version(self, item: PendingTrajectory) -> int | None:
        """V_group as it will be after the commands so far."""
        return self._group_versions.get(item.group_id, item.group_version)

    def admits(self, item: PendingTrajectory, version: int) -> bool:
        """Whether the protocol lets the trajectory start or go on under weights of `version`."""
        group_version = self.group_version(item)
        if group_version is None:
            return self._reservable > 0 and self._counts.can_add(version)
        return version >= group_version or self._counts.can_move(group_version, version)

    def route(self, item: PendingTrajectory, instance: str, reason: str) -> None:
        """Order a Route; `admits` must hold for the instance's version."""
        state = self.instances[instance]
        admission = self._admit(item, state.version)
        self._ordered.add(item.trajectory_id)
        group_version = self.group_version(item)
        assert group_version is not None
        self._order(
            Route(
                instance=instance,
                incarnation=state.incarnation,
                seq=state.next_seq,
                trajectory_id=item.trajectory_id,
                group_id=item.group_id,
                min_version=group_version,
                admission=admission,
                length=item.length,
                reason=reason,
            )
        )

    def pull(self, instance: str, reason: str) -> None:
        """Order a Pull of the newest version."""
        state = self.instances[instance]
        self._order(
            Pull(
                instance=instance,
                incarnation=state.incarnation,
                seq=state.next_seq,
                version=self.snapshot.newest_version,
                reason=reason,
            )
        )

    def interrupt(self, trajectory_id: str, length: int, instance: str, reason: str) -> None:
        """Order an Interrupt of a trajectory that is on the instance."""
        state = self.instances[instance]
        self._ordered.add(trajectory_id)
        self._order(
            Interrupt(
                instance=instance,
                incarnation=state.incarnation,
                seq=state.next_seq,
                trajectory_id=trajectory_id,
                length=length,
                reason=reason,
            )
        )

    def _admit(self, item: PendingTrajectory, version: int) -> Admission | None:
        group_version = self.group_version(item)
        if group_version is None:
            self._counts.add(version)
            self._reservable -= 1
            self._group_versions[item.group_id] = version
            return Admission(kind="reserve", version=version)
        if version < group_version:
            self._counts.move(group_version, version)
            self._group_versions[item.group_id] = version
            return Admission(kind="lower", version=version)
        return None

    def _order(self, command: Command) -> None:
        self.instances[command.instance] = apply(self.instances[command.instance], command)
        self.commands.append(command)
