"""Trajectories that wait in the trajectory server, as a multi-level queue by V_group.

Invariant: a trajectory is listed once, at the level of its group's reservation; members of groups without
a reservation are the last level. Adding, removing and moving a group cost O(members), whatever is waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTrajectory:
    """What routing may know of a waiting trajectory."""

    trajectory_id: str
    group_id: str
    group_version: int | None
    """V_group of the reservation; None when the group has none yet."""
    length: int
    """Prompt and response tokens so far."""


class PendingTrajectories:
    """Levels oldest V_group first, unreserved last; first come, first served inside a level."""

    def __init__(self) -> None:
        self._levels: dict[int | None, dict[str, PendingTrajectory]] = {}
        self._level_of: dict[str, int | None] = {}
        self._groups: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._level_of

    def __iter__(self) -> Iterator[PendingTrajectory]:
        for level in self.levels():
            yield from self._levels[level].values()

    def levels(self) -> list[int | None]:
        """V_group values present, oldest first; None (no reservation) last."""
        return sorted(self._levels, key=lambda level: (level is None, level or 0))

    def level(self, version: int | None) -> Iterator[PendingTrajectory]:
        """The trajectories of one level, in order of arrival."""
        return iter(self._levels.get(version, {}).values())

    def level_size(self, version: int | None) -> int:
        """How many trajectories one level has."""
        return len(self._levels.get(version, ()))

    def get(self, trajectory_id: str) -> PendingTrajectory:
        """The waiting trajectory of this id; KeyError when it does not wait."""
        return self._levels[self._level_of[trajectory_id]][trajectory_id]

    def add(self, item: PendingTrajectory) -> None:
        """List a trajectory at the end of its level."""
        self._level_of[item.trajectory_id] = item.group_version
        self._levels.setdefault(item.group_version, {})[item.trajectory_id] = item
        self._groups.setdefault(item.group_id, {})[item.trajectory_id] = None

    def remove(self, trajectory_id: str) -> PendingTrajectory:
        """Take a trajectory off the list; KeyError when it is not on it."""
        level = self._level_of.pop(trajectory_id)
        item = self._levels[level].pop(trajectory_id)
        if not self._levels[level]:
            del self._levels[level]
        members = self._groups[item.group_id]
        del members[trajectory_id]
        if not members:
            del self._groups[item.group_id]
        return item

    def move_group(self, group_id: str, version: int) -> None:
        """The group's reservation is now at `version`: its waiting members change level."""
        for trajectory_id in list(self._groups.get(group_id, ())):
            self.add(replace(self.remove(trajectory_id), group_version=version))
