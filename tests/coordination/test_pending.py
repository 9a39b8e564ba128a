"""The multi-level queue of waiting trajectories."""

from __future__ import annotations

import pytest

from staleflow.coordination.snapshot import PendingTrajectories, PendingTrajectory


def item(trajectory: str, group: str, version: int | None) -> PendingTrajectory:
    return PendingTrajectory(trajectory_id=trajectory, group_id=group, group_version=version, length=3)


def ids(queue: PendingTrajectories) -> list[str]:
    return [i.trajectory_id for i in queue]


def test_oldest_reservation_first_then_arrival_and_unreserved_last() -> None:
    queue = PendingTrajectories()
    for trajectory, group, version in [("n0", "n", None), ("b0", "b", 4), ("a0", "a", 2), ("b1", "b", 4)]:
        queue.add(item(trajectory, group, version))
    assert ids(queue) == ["a0", "b0", "b1", "n0"]
    assert queue.levels() == [2, 4, None]


def test_a_reservation_moves_the_waiting_members_of_its_group_only() -> None:
    queue = PendingTrajectories()
    for trajectory, group in [("x0", "x"), ("y0", "y"), ("x1", "x")]:
        queue.add(item(trajectory, group, None))
    queue.remove("x0")
    queue.move_group("x", 7)
    assert ids(queue) == ["x1", "y0"]
    assert queue.get("x1").group_version == 7
    assert "x0" not in queue
    assert len(queue) == 2


def test_moving_a_group_that_does_not_wait_changes_nothing() -> None:
    queue = PendingTrajectories()
    queue.add(item("x0", "x", 1))
    queue.move_group("other", 0)
    assert ids(queue) == ["x0"]


def test_removing_what_does_not_wait_is_an_error() -> None:
    with pytest.raises(KeyError):
        PendingTrajectories().remove("x0")
