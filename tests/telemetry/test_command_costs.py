"""What commands cost: totals of an attempt over incarnations, migration's share, preemptions."""

from __future__ import annotations

from scripted_events import received, report, teller

from staleflow.coordination.actions import Interrupt, Pull, Route
from staleflow.telemetry.command_costs import CommandCosts
from staleflow.telemetry.events import CommandSent, ControlRan


def interrupt(seq: int, reason: str, incarnation: int = 1) -> Interrupt:
    return Interrupt(
        instance="i0", incarnation=incarnation, seq=seq, trajectory_id=f"t{seq}", length=9, reason=reason
    )


def test_seconds_are_differences_and_survive_an_incarnation() -> None:
    costs = CommandCosts()
    tell = teller(costs)
    tell(
        received(report(acked_seq=1, pull_seconds=1.0, route_seconds=0.5, abort_seconds=0.25, preemptions=2))
    )
    tell(
        received(report(acked_seq=2, pull_seconds=1.5, route_seconds=0.5, abort_seconds=0.25, preemptions=5))
    )
    tell(
        received(
            report(
                acked_seq=1,
                incarnation=2,
                pull_seconds=0.25,
                route_seconds=0.25,
                preemptions=1,
                busy_seconds=3.0,
            )
        )
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
    tell = teller(costs)
    tell(
        CommandSent(
            Route(instance="i0", incarnation=1, seq=1, trajectory_id="t", group_id="g", min_version=0)
        )
    )
    tell(CommandSent(interrupt(2, "migration: 3 wait on i0")))
    tell(CommandSent(interrupt(3, "no new token for 60 s")))
    tell(CommandSent(interrupt(4, "migration: 3 wait on i0")))
    tell(CommandSent(Pull(instance="i0", incarnation=1, seq=5, version=1)))
    tell(received(report(acked_seq=3, interrupt_seconds=1.0)))  # one of two
    tell(received(report(acked_seq=5, interrupt_seconds=1.25)))  # the third
    totals = costs.totals()
    assert totals["coord/interrupt_count"] == 3
    assert totals["coord/migrate_count"] == 2
    assert totals["coord/route_count"] == totals["coord/pull_count"] == 1
    assert totals["coord/abort_count"] == 0
    assert totals["coord/interrupt_seconds"] == 1.25
    assert totals["coord/migrate_seconds"] == 0.75


def test_an_interrupt_to_a_lost_incarnation_takes_no_share() -> None:
    costs = CommandCosts()
    tell = teller(costs)
    tell(CommandSent(interrupt(1, "migration: it died before")))
    tell(CommandSent(interrupt(1, "a stall", incarnation=2)))
    tell(received(report(acked_seq=1, incarnation=2, interrupt_seconds=1.0)))
    assert costs.totals()["coord/migrate_seconds"] == 0.0


def test_cycle_and_handle_make_up_the_time_in_control() -> None:
    costs = CommandCosts()
    tell = teller(costs)
    tell(ControlRan(0.5, in_cycle=True))
    tell(ControlRan(0.25, in_cycle=False))
    totals = costs.totals()
    assert (totals["coord/step_seconds"], totals["coord/handle_seconds"], totals["coord/seconds"]) == (
        0.5,
        0.25,
        0.75,
    )


def test_a_row_has_what_came_since_the_row_before() -> None:
    costs = CommandCosts()
    tell = teller(costs)
    tell(CommandSent(Pull(instance="i0", incarnation=1, seq=1, version=1)))
    tell(received(report(acked_seq=1, pull_seconds=1.0)))
    assert (costs.take()["coord/pull_count"], costs.take()["coord/pull_count"]) == (1, 0)
    tell(received(report(acked_seq=1, pull_seconds=1.5)))
    assert costs.take()["coord/pull_seconds"] == 0.5
    assert costs.totals()["coord/pull_seconds"] == 1.5
