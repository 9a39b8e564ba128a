"""Trajectories that wait in the trajectory server, as a multi-level queue by V_group.

Invariants: a trajectory is listed once, with its group, at the level of the group's reservation; groups
without a reservation are the last level. Adding and removing cost O(1), and moving a group to another level
O(its waiting members), whatever else is waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PendingTrajectory:
    """What routing may know of a waiting trajectory. Only the queue it is in changes it."""

    trajectory_id: str
    group_id: str
    group_version: int | None
    """V_group of the reservation; None when the group has none yet."""
    length: int
    """Prompt and response tokens so far."""


class PendingTrajectories:
    """Levels oldest V_group first, unreserved last. First come, first served inside a level, group by group:
    a trajectory that comes back to its group's waiting members waits with them.
    """

    def __init__(self) -> None:
        self._items: dict[str, PendingTrajectory] = {}
        self._groups: dict[str, dict[str, PendingTrajectory]] = {}
        """Waiting members by group, none empty."""
        self._levels: dict[int | None, dict[str, dict[str, PendingTrajectory]]] = {}
        """The same groups by level, in order of arrival there; none empty."""

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
        """The trajectories of one level in their order."""
        for members in self._levels.get(version, {}).values():
            yield from members.values()

    def level_size(self, version: int | None) -> int:
        """How many trajectories one level has. O(its groups)."""
        return sum(map(len, self._levels.get(version, {}).values()))

    def get(self, trajectory_id: str) -> PendingTrajectory:
        """The waiting trajectory of this id; KeyError when it does not wait."""
        return self._items[trajectory_id]

    def add(self, item: PendingTrajectory) -> None:
        """List a trajectory behind its group's waiting members, or at the end of its level."""
        members = self._groups.get(item.group_id)
        if members is None:
            members = self._groups[item.group_id] = {}
            self._levels.setdefault(item.group_version, {})[item.group_id] = members
        members[item.trajectory_id] = item
        self._items[item.trajectory_id] = item

    def remove(self, trajectory_id: str) -> PendingTrajectory:
        """Take a trajectory off the list; KeyError when it is not on it."""
        item = self._items.pop(trajectory_id)
        members = self._groups[item.group_id]
        del members[trajectory_id]
        if not members:
            del self._groups[item.group_id]
            self._leave_level(item.group_version, item.group_id)
        return item

    def move_group(self, group_id: str, version: int) -> None:
        """The group's reservation is now at `version`: its waiting members go to the end of that level."""
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
