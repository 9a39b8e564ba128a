"""What the coordinator sees: the queue of waiting trajectories, the instances, and the state of the run.

A snapshot is read-only: the coordinator decides on a speculative copy (`speculative.py`), and `Control`
applies the decision. Parts of a snapshot are shared with `Control`, not copied, so a cycle costs what
changed, not what exists.

The queue has levels by V_group. Invariants: a trajectory is listed once, with its group, at the level of the
group's reservation; groups without a reservation form the last level. Adding and removing cost O(1), moving a
group to another level O(its waiting members).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from staleflow.coordination.actions import Command
from staleflow.coordination.cost_model import START_VALUES, CostModel
from staleflow.protocol.placement import DeadlineCounts

# ---------------------------------------------------------------------- waiting trajectories


@dataclass(slots=True, kw_only=True)
class PendingTrajectory:
    """A waiting trajectory, as routing sees it. Only its queue changes it."""

    trajectory_id: str
    group_id: str
    group_version: int | None
    """V_group of the reservation; None when the group has none yet."""
    length: int
    """Prompt and response tokens so far."""


class PendingTrajectories:
    """Levels by V_group, oldest first, unreserved last; within a level first come, first served, by group.

    A trajectory that returns while members of its group wait queues with them.
    """

    def __init__(self) -> None:
        self._items: dict[str, PendingTrajectory] = {}
        self._groups: dict[str, dict[str, PendingTrajectory]] = {}
        """Waiting members by group; no entry is empty."""
        self._levels: dict[int | None, dict[str, dict[str, PendingTrajectory]]] = {}
        """The same groups by level, in order of arrival there; no level is empty."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._items

    def __iter__(self) -> Iterator[PendingTrajectory]:
        for level in self.levels():
            yield from self.level(level)

    def levels(self) -> list[int | None]:
        """V_group values present, oldest first; None (no reservation) last."""
        return sorted(self._levels, key=lambda level: (level is None, level or 0))

    def level(self, version: int | None) -> Iterator[PendingTrajectory]:
        """The trajectories of one level, in order."""
        for members in self._levels.get(version, {}).values():
            yield from members.values()

    def level_size(self, version: int | None) -> int:
        """Number of trajectories in one level. O(its groups)."""
        return sum(map(len, self._levels.get(version, {}).values()))

    def get(self, trajectory_id: str) -> PendingTrajectory:
        """The waiting trajectory with this id; KeyError if it does not wait."""
        return self._items[trajectory_id]

    def add(self, item: PendingTrajectory) -> None:
        """Append a trajectory to its group's waiting members; a new group goes to the end of its level."""
        members = self._groups.get(item.group_id)
        if members is None:
            members = self._groups[item.group_id] = {}
            self._levels.setdefault(item.group_version, {})[item.group_id] = members
        members[item.trajectory_id] = item
        self._items[item.trajectory_id] = item

    def remove(self, trajectory_id: str) -> PendingTrajectory:
        """Remove a trajectory; KeyError if it does not wait."""
        item = self._items.pop(trajectory_id)
        members = self._groups[item.group_id]
        del members[trajectory_id]
        if not members:
            del self._groups[item.group_id]
            self._leave_level(item.group_version, item.group_id)
        return item

    def move_group(self, group_id: str, version: int) -> None:
        """The group's reservation is now at `version`: its waiting members move to the end of that level."""
        members = self._groups.get(group_id)
        if members is None:
            return
        self._leave_level(next(iter(members.values())).group_version, group_id)
        self._levels.setdefault(version, {})[group_id] = members
        for item in members.values():
            item.group_version = version

    def _leave_level(self, version: int | None, group_id: str) -> None:
        level = self._levels[version]
        del level[group_id]
        if not level:
            del self._levels[version]


# ---------------------------------------------------------------------- instances and the whole


class InstanceSnapshot(NamedTuple):
    """One instance as it last reported itself. A named tuple, because every report creates one."""

    instance: str
    incarnation: int
    revision: int
    """Changes whenever anything here does."""
    version: int
    """Loaded weight version."""
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    """Tokens."""
    max_running: int
    acked_seq: int
    generated_tokens: int = 0
    busy_seconds: float = 0.0


class InstanceView(NamedTuple):
    """An instance with its unacknowledged commands, oldest first."""

    snapshot: InstanceSnapshot
    outstanding: tuple[Command, ...]
    next_seq: int


class Resident(NamedTuple):
    """A trajectory on an instance, as migration sees it. A named tuple, because migration reads many."""

    trajectory_id: str
    group_id: str
    group_version: int
    """V_group of its reservation."""
    length: int
    """Prompt and response tokens as last reported."""
    response: int
    """Response tokens among them."""
    routed_at: float
    """Time of the Route that brought it there."""
    routed_length: int
    """Its length at that time; tokens gained since are its progress there."""
    fruitless: int
    """Consecutive earlier Routes on which it gained no token."""
    leaving: bool
    """An Interrupt to it is not acknowledged yet."""


def no_residents(instance: str) -> tuple[Resident, ...]:
    """An instance without trajectories."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the run at one moment."""

    now: float
    """Seconds on the caller's clock."""
    next_buffer: int
    newest_version: int
    """Newest complete version in the parameter server."""
    counts: DeadlineCounts
    """Firm entries by deadline. Readers may copy it, never change it."""
    reservable: int
    """Firm groups that may still be reserved before the run's last step."""
    pending: PendingTrajectories
    instances: Mapping[str, InstanceView]
    group_members: int
    """Trajectories per fresh group, redundant members included."""
    expected_growth: int
    """Tokens that a fresh trajectory is expected to generate."""
    expected_held: int = 0
    """Average tokens, prompt included, of a running trajectory. 0: not known yet."""
    costs: CostModel = START_VALUES
    """Present estimate of what decoding costs on an instance."""
    spares_free: int = 0
    """Spare groups that may still be reserved."""
    resident: Callable[[str], tuple[Resident, ...]] = no_residents
    """The trajectories of an instance in the order of their Routes; those in its own queue come last."""
