"""What commands cost: totals of an attempt over incarnations, migration's share, preemptions."""

from __future__ import annotations

from staleflow.coordination.actions import Interrupt, Pull, Route
from staleflow.coordination.events import InstanceReport
from staleflow.runtime.command_costs import CommandCosts


def report(acked: int, *, incarnation: int = 1, **figures: float) -> InstanceReport:
    return InstanceReport(
        instance="i0",
        incarnation=incarnation,
        revision=1,
        version=0,
        acked_seq=acked,
        **figures,  # type: ignore[arg-type]
    )


def interrupt(seq: int, reason: str, incarnation: int = 1) -> Interrupt:
    return Interrupt(
        instance="i0", incarnation=incarnation, seq=seq, trajectory_id=f"t{seq}", length=9, reason=reason
    )


def test_seconds_are_differences_and_survive_an_incarnation() -> None:
    costs = CommandCosts()
    costs.reported(report(1, pull_seconds=1.0, route_seconds=0.5, abort_seconds=0.25, preemptions=2))
    costs.reported(report(2, pull_seconds=1.5, route_seconds=0.5, abort_seconds=0.25, preemptions=5))
    costs.reported(
        report(1, incarnation=2, pull_seconds=0.25, route_seconds=0.25, preemptions=1, busy_seconds=3.0)
    )
    totals = costs.totals()
    assert totals["coord/pull_seconds"] == totals["timing_s/pull"] == 1.75
    assert totals["coord/route_seconds"] == 0.75
    assert totals["coord/abort_seconds"] == 0.25
    assert totals["time/decoding_s"] == 3.0
    assert totals["rollout/preemptions"] == 6
    assert costs.preemptions == {"i0": 6}


def test_migrations_are_counted_among_interrupts_and_share_their_time() -> None:
    costs = CommandCosts()
    costs.command(Route(instance="i0", incarnation=1, seq=1, trajectory_id="t", group_id="g", min_version=0))
    costs.command(interrupt(2, "migration: 3 wait on i0"))
    costs.command(interrupt(3, "no new token for 60 s"))
    costs.command(interrupt(4, "migration: 3 wait on i0"))
    costs.command(Pull(instance="i0", incarnation=1, seq=5, version=1))
    costs.reported(report(3, interrupt_seconds=1.0))  # one of two
    costs.reported(report(5, interrupt_seconds=1.25))  # the third
    totals = costs.totals()
    assert totals["coord/interrupt_count"] == 3
    assert totals["coord/migrate_count"] == 2
    assert totals["coord/route_count"] == totals["coord/pull_count"] == 1
    assert totals["coord/abort_count"] == 0
    assert totals["coord/interrupt_seconds"] == 1.25
    assert totals["coord/migrate_seconds"] == 0.75


def test_an_interrupt_to_a_lost_incarnation_takes_no_share() -> None:
    costs = CommandCosts()
    costs.command(interrupt(1, "migration: it died before"))
    costs.command(interrupt(1, "a stall", incarnation=2))
    costs.reported(report(1, incarnation=2, interrupt_seconds=1.0))
    assert costs.totals()["coord/migrate_seconds"] == 0.0


def test_cycle_and_handle_make_up_the_time_in_control() -> None:
    costs = CommandCosts()
    costs.coordinated(0.5, in_cycle=True)
    costs.coordinated(0.25, in_cycle=False)
    totals = costs.totals()
    assert (totals["coord/step_seconds"], totals["coord/handle_seconds"], totals["coord/seconds"]) == (
        0.5,
        0.25,
        0.75,
    )
