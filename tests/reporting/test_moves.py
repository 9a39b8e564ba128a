"""Lines of a journal as moves: what each line does to the place of a trajectory, and what does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.reporting.history.moves import Move, Moves


def on(*trajectories: str, instance: str = "i0") -> Moves:
    """Each was routed to the instance, by sequence numbers from 1 on."""
    moves = Moves()
    for seq, trajectory_id in enumerate(trajectories, start=1):
        moves.take({"k": "route", "i": instance, "q": seq, "id": trajectory_id})
    return moves


def test_a_route_puts_a_trajectory_on_an_instance() -> None:
    moves = Moves()
    assert moves.take({"k": "route", "i": "i0", "q": 4, "id": "a"}) == [
        Move(trajectory_id="a", state="running", instance="i0", why="routed")
    ]
    assert (moves.instance_of("a"), moves.route_of("a")) == ("i0", 4)
    assert (moves.instance_of("b"), moves.route_of("b")) == ("", 0)


@pytest.mark.parametrize(
    ("line", "state", "why"),
    [
        ({"k": "back", "i": "i0", "id": "a"}, "pending", "interrupted"),
        ({"k": "done", "i": "i0", "id": "a", "end": "stop"}, "scoring", "stop"),
        ({"k": "reject", "i": "i0", "q": 1, "id": "a"}, "pending", "refused"),
        ({"k": "lost", "i": "i0"}, "pending", "lost"),
        ({"k": "external", "id": "a"}, "external", "external"),
        ({"k": "abort", "i": "i0", "id": "a"}, None, "aborted"),
        ({"k": "cut", "id": "a"}, "scoring", "truncated"),
        ({"k": "release", "ids": ["a"]}, None, "released"),
    ],
)
def test_a_line_that_ends_a_stay(line: dict[str, Any], state: Any, why: str) -> None:
    moves = on("a")
    assert moves.take(line) == [Move(trajectory_id="a", state=state, left="i0", why=why)]
    assert moves.instance_of("a") == ""
    assert moves.end() == []


@pytest.mark.parametrize(
    "line",
    [
        {"k": "back", "i": "i1", "id": "a"},
        {"k": "done", "i": "i1", "id": "a", "end": "stop"},
        {"k": "reject", "i": "i0", "q": 2, "id": "a"},
        {"k": "reject", "i": "i0", "q": 1},
        {"k": "lost", "i": "i1"},
        {"k": "report", "i": "i0", "q": 9},
        {"k": "load", "i": "i0"},
    ],
    ids=lambda line: line["k"],
)
def test_a_line_about_another_instance_or_an_earlier_route_moves_nothing(line: dict[str, Any]) -> None:
    moves = on("a")
    assert moves.take(line) == []
    assert moves.instance_of("a") == "i0"


def test_an_interrupt_that_is_acknowledged_without_its_trajectory_puts_it_back() -> None:
    moves = on("a", "b")
    assert moves.take({"k": "interrupt", "i": "i0", "q": 3, "id": "a"}) == []
    assert moves.take({"k": "report", "i": "i0", "q": 2}) == []
    not_there = Move(trajectory_id="a", state="pending", left="i0", why="not there")
    assert moves.take({"k": "report", "i": "i0", "q": 3}) == [not_there]
    assert moves.take({"k": "report", "i": "i0", "q": 4}) == []


def test_an_interrupt_is_forgotten_when_its_trajectory_left() -> None:
    """Back on the same instance by a later Route, it stays there."""
    moves = on("a")
    moves.take({"k": "interrupt", "i": "i0", "q": 2, "id": "a"})
    moves.take({"k": "back", "i": "i0", "id": "a"})
    moves.take({"k": "route", "i": "i0", "q": 3, "id": "a"})
    assert moves.take({"k": "report", "i": "i0", "q": 3}) == []


def test_a_new_attempt_begins_with_empty_instances() -> None:
    moves = on("a", "b")
    assert [(m.trajectory_id, m.state, m.left) for m in moves.take({"k": "begin", "a": 1, "step": 0})] == [
        ("a", None, "i0"),
        ("b", None, "i0"),
    ]
    assert moves.end() == []
