"""Every living group and trajectory, and the transitions between their states.

Invariants: a trajectory changes state only along `protocol.lifecycle.TRANSITIONS`; it is in `pending` exactly
while it is PENDING and has an instance exactly while it is RUNNING; consumed and released trajectories are
removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from staleflow.coordination.events import DrawnGroup
from staleflow.coordination.snapshot import PendingTrajectories, PendingTrajectory
from staleflow.errors import ProtocolError
from staleflow.protocol.lifecycle import TRANSITIONS, TrajectoryState, check_transition


class Member:
    """One trajectory. Any code may read it; its state changes only through `TrajectoryTable`."""

    __slots__ = (
        "failure",
        "fruitless",
        "group_id",
        "instance",
        "leaving",
        "length",
        "prompt_length",
        "raw",
        "resampled",
        "retries",
        "route_seq",
        "routed_at",
        "routed_length",
        "state",
        "token_hash",
        "trajectory_id",
        "usable",
    )

    def __init__(self, trajectory_id: str, group_id: str, prompt_length: int) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.prompt_length = prompt_length
        self.length = prompt_length
        self.state = TrajectoryState.PENDING
        self.instance: str | None = None
        self.route_seq = 0
        self.routed_at = 0.0
        self.routed_length = -1
        self.fruitless = 0
        self.leaving = False
        self.failure = ""
        self.retries = 0
        self.resampled = 0
        """Earlier trajectories in its place that were aborted as stragglers."""
        self.raw = 0.0
        self.usable = True
        self.token_hash = ""


class Group:
    """The trajectories of one prompt. `version` is V_group, None before the reservation."""

    __slots__ = ("group_id", "members", "occupied", "redrawn", "rewarded", "usable", "version")

    def __init__(self, group_id: str, members: tuple[str, ...], redrawn: bool = False) -> None:
        self.group_id = group_id
        self.members = members
        self.redrawn = redrawn
        self.version: int | None = None
        self.rewarded: list[str] = []
        """Rewarded members, in the order of their rewards."""
        self.usable = 0
        """Usable members among those."""
        self.occupied = False


class TrajectoryTable:
    """Groups and trajectories by id."""

    def __init__(self) -> None:
        self.pending = PendingTrajectories()
        self._groups: dict[str, Group] = {}
        self._members: dict[str, Member] = {}
        self._unreserved: dict[str, None] = {}
        self._in_state = dict.fromkeys(TrajectoryState, 0)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._members

    def count(self, state: TrajectoryState) -> int:
        """Number of living trajectories in a state."""
        return self._in_state[state]

    @property
    def unreserved(self) -> int:
        """Groups without a reservation."""
        return len(self._unreserved)

    def groups(self) -> Iterator[Group]:
        """Living groups in order of drawing."""
        return iter(self._groups.values())

    def members(self) -> Iterator[Member]:
        """Living trajectories in order of drawing."""
        return iter(self._members.values())

    def group(self, group_id: str) -> Group:
        """The living group with this id; KeyError if there is none."""
        return self._groups[group_id]

    def member(self, trajectory_id: str) -> Member:
        """The living trajectory with this id; KeyError if there is none."""
        return self._members[trajectory_id]

    def find(self, trajectory_id: str) -> Member | None:
        """The living trajectory with this id; None if it was released or consumed."""
        return self._members.get(trajectory_id)

    def add(self, drawn: DrawnGroup) -> None:
        """Add a fresh group; all its members are pending."""
        if drawn.group_id in self._groups:
            raise ProtocolError(f"group {drawn.group_id} was drawn twice")
        group = Group(drawn.group_id, drawn.members, drawn.redrawn)
        self._groups[drawn.group_id] = group
        self._unreserved[drawn.group_id] = None
        for trajectory_id in drawn.members:
            member = Member(trajectory_id, drawn.group_id, drawn.prompt_length)
            self._members[trajectory_id] = member
            self._in_state[member.state] += 1
            self._list_pending(member)

    def set_version(self, group_id: str, version: int) -> None:
        """The group's reservation was made, or lowered, to `version`."""
        self._groups[group_id].version = version
        self._unreserved.pop(group_id, None)
        self.pending.move_group(group_id, version)

    def start(self, member: Member, instance: str, seq: int) -> None:
        """PENDING to RUNNING."""
        self._move(member, TrajectoryState.RUNNING)
        self.pending.remove(member.trajectory_id)
        member.instance = instance
        member.route_seq = seq

    def grow(self, instance: str, lengths: Iterable[tuple[str, int]]) -> list[str]:
        """Update the lengths of trajectories on an instance; returns the ids still there."""
        members, present = self._members, []
        for trajectory_id, length in lengths:
            member = members.get(trajectory_id)
            if member is not None and member.instance == instance:
                member.length = length
                present.append(trajectory_id)
        return present

    def to_pending(self, member: Member, length: int) -> None:
        """To PENDING: back in the trajectory server with its tokens."""
        self._move(member, TrajectoryState.PENDING)
        member.length = length
        self._left_instance(member)
        self._list_pending(member)

    def to_generated(self, member: Member, length: int) -> None:
        """To GENERATED: complete, cut, or given up (also while pending)."""
        was_pending = member.state is TrajectoryState.PENDING
        self._move(member, TrajectoryState.GENERATED)
        if was_pending:
            self.pending.remove(member.trajectory_id)
        member.length = length
        self._left_instance(member)

    def to_waiting_external(self, member: Member) -> None:
        """GENERATED to WAITING_EXTERNAL: its environment answers later."""
        self._move(member, TrajectoryState.WAITING_EXTERNAL)

    def to_rewarded(self, member: Member, raw: float, usable: bool, token_hash: str) -> None:
        """GENERATED to REWARDED."""
        self._move(member, TrajectoryState.REWARDED)
        member.raw, member.usable, member.token_hash = raw, usable, token_hash

    def forget(self, group_id: str, state: TrajectoryState) -> list[Member]:
        """Consume or release a group. Returns the members it still had."""
        group = self._groups.pop(group_id)
        self._unreserved.pop(group_id, None)
        left = [self._members[m] for m in group.members if m in self._members]
        for member in left:
            self.forget_member(member, state)
        return left

    def forget_member(self, member: Member, state: TrajectoryState) -> None:
        """Consume or release one trajectory."""
        if member.state is TrajectoryState.PENDING:
            self.pending.remove(member.trajectory_id)
        self._move(member, state)
        self._in_state[state] -= 1
        del self._members[member.trajectory_id]

    def resample(self, member: Member, trajectory_id: str) -> Member:
        """Release a trajectory and replace it in its group by a fresh one."""
        if trajectory_id in self._members:
            raise ProtocolError(f"trajectory {trajectory_id} was created twice")
        group = self._groups[member.group_id]
        self.forget_member(member, TrajectoryState.RELEASED)
        group.members = tuple(trajectory_id if m == member.trajectory_id else m for m in group.members)
        fresh = Member(trajectory_id, member.group_id, member.prompt_length)
        fresh.resampled = member.resampled + 1
        self._members[trajectory_id] = fresh
        self._in_state[fresh.state] += 1
        self._list_pending(fresh)
        return fresh

    def _move(self, member: Member, to: TrajectoryState) -> None:
        before, in_state = member.state, self._in_state
        if to not in TRANSITIONS[before]:
            check_transition(member.trajectory_id, before, to)
        in_state[before] -= 1
        in_state[to] += 1
        member.state = to

    def _left_instance(self, member: Member) -> None:
        member.instance = None
        member.leaving = False

    def _list_pending(self, member: Member) -> None:
        self.pending.add(
            PendingTrajectory(
                trajectory_id=member.trajectory_id,
                group_id=member.group_id,
                group_version=self._groups[member.group_id].version,
                length=member.length,
            )
        )
