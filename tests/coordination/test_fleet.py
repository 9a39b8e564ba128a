"""What `Control` counts on for an instance: its last report, and the commands that it has not seen."""

from __future__ import annotations

import pytest

from staleflow.coordination.actions import Abort, Command, Interrupt, Route
from staleflow.coordination.events import InstanceJoined, InstanceReport, Rejection, TrajectoryReport
from staleflow.coordination.fleet import Fleet
from staleflow.coordination.speculative import speculate

TO = {"instance": "i0", "incarnation": 1}


def fleet(*commands: Command) -> Fleet:
    fleet = Fleet()
    fleet.join(InstanceJoined(**TO, version=0, kv_capacity=100, max_running=4))
    for command in commands:
        fleet.order(command)
    return fleet


def route(seq: int, name: str) -> Route:
    return Route(**TO, seq=seq, trajectory_id=name, group_id="g", min_version=0, length=10)


@pytest.mark.parametrize("kind", [Abort, Interrupt])
def test_a_command_to_a_trajectory_that_has_finished_meanwhile_takes_nothing_away(
    kind: type[Abort | Interrupt],
) -> None:
    """`b` finished before the command reached it, and is not counted in the report: only `a` is there."""
    there = fleet(route(1, "a"), route(2, "b"), kind(**TO, seq=3, trajectory_id="b", length=10))
    done = TrajectoryReport(trajectory_id="b", length=15, min_version=0, finish_reason="stop")
    there.report(
        InstanceReport(**TO, revision=1, version=0, acked_seq=2, finished=(done,), running=1, kv_tokens=12)
    )
    state = speculate(there.views()["i0"])
    assert (state.resident, state.kv_tokens, state.next_seq) == (1, 12, 4)


def test_a_command_to_a_trajectory_whose_route_was_refused_takes_nothing_away() -> None:
    there = fleet(route(1, "a"), route(2, "b"), Interrupt(**TO, seq=3, trajectory_id="b", length=10))
    refused = Rejection(seq=2, trajectory_id="b", reason="old", stale_version=True)
    there.report(
        InstanceReport(
            **TO, revision=1, version=0, acked_seq=2, rejections=(refused,), running=1, kv_tokens=12
        )
    )
    assert speculate(there.views()["i0"]).resident == 1
