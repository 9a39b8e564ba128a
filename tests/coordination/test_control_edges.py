"""`Control` where something unusual happens: worked out by hand, one event at a time."""

from __future__ import annotations

from collections.abc import Sequence

from by_hand import PROMPT, Hand

from staleflow.coordination.actions import (
    Abort,
    Action,
    Admission,
    Command,
    Discard,
    DrawGroups,
    Finish,
    GiveUp,
    Interrupt,
    Route,
    Score,
    Send,
    Train,
)
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator, Decision
from staleflow.coordination.events import (
    DrawnGroup,
    Ended,
    GroupsDrawn,
    InstanceJoined,
    InstanceReport,
    Pushed,
    Reported,
    Rewarded,
    StopRequested,
    TrainerFree,
    TrajectoryReport,
    WaitingExternal,
)
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting
from staleflow.coordination.snapshot import Snapshot
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState


class Scripted(Coordinator):
    """Orders what it was told, whatever the snapshot says."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._script = tuple(commands)

    def step(self, snapshot: Snapshot) -> Decision:
        commands, self._script = self._script, ()
        return Decision(commands=commands)


def naive() -> Coordinator:
    return Coordinator(
        routing=NaiveRouting(), synchronization=NaiveSynchronization(), migration=NaiveMigration()
    )


def control(coordinator: Coordinator, *, batch_size: int = 1, group_size: int = 1) -> Control:
    """One instance of version 0 and weights of version 0; nothing drawn yet."""
    made = Control(
        buffer=StalenessBuffer(bound=0, batch_size=batch_size),
        coordinator=coordinator,
        batches=BatchSettings(steps=5, group_size=group_size),
    )
    made.handle(Pushed(version=0))
    made.handle(InstanceJoined(instance="i0", incarnation=1, version=0, kv_capacity=1000, max_running=8))
    return made


def draw(made: Control, *groups: tuple[str, int]) -> None:
    """Groups by name and number of members, as if they had been asked for."""
    made.handle(
        GroupsDrawn(
            groups=tuple(
                DrawnGroup(group_id=g, members=tuple(f"{g}{m}" for m in range(n)), prompt_length=4)
                for g, n in groups
            )
        )
    )


def report(made: Control, *, acked: int, finished: Sequence[str] = (), revision: int = 1) -> list[Action]:
    return made.handle(
        Reported(
            report=InstanceReport(
                instance="i0",
                incarnation=1,
                revision=revision,
                version=0,
                acked_seq=acked,
                finished=tuple(
                    TrajectoryReport(trajectory_id=t, length=9, min_version=0, finish_reason="stop")
                    for t in finished
                ),
            )
        )
    )


def rewarded(trajectory_id: str, raw: float = 1.0) -> Rewarded:
    return Rewarded(trajectory_id=trajectory_id, raw=raw, usable=True, token_hash="h")


def route(seq: int, trajectory_id: str, admission: Admission | None) -> Route:
    return Route(
        instance="i0",
        incarnation=1,
        seq=seq,
        trajectory_id=trajectory_id,
        group_id=trajectory_id[0],
        min_version=0,
        admission=admission,
    )


def test_routes_behind_a_refused_one_go_out_without_a_gap_and_its_group_does_not() -> None:
    """One place, three groups: b's reservation is refused, so neither of its members may leave."""
    reserve = Admission(kind="reserve", version=0)
    commands = [
        route(1, "a0", reserve),
        route(2, "b0", reserve),
        route(3, "b1", None),
        route(4, "a1", None),
    ]
    made = control(Scripted(commands), group_size=2)
    draw(made, ("a", 2), ("b", 2))
    sent = [e.command for e in made.cycle(1.0) if isinstance(e, Send)]
    assert [(c.seq, c.trajectory_id) for c in sent if isinstance(c, Route)] == [(1, "a0"), (2, "a1")]
    assert [m.trajectory_id for m in made._trajectories.members() if m.state is TrajectoryState.PENDING] == [
        "b0",
        "b1",
    ]


def test_a_trajectory_whose_environment_ended_it_late_is_scored_without_a_limit() -> None:
    """The time limit is the environment's; once it has answered, scoring may take longer."""
    made = control(naive())
    draw(made, ("a", 1))
    made.cycle(1.0)
    assert [e for e in report(made, acked=1, finished=["a0"]) if isinstance(e, Score)]
    made.handle(WaitingExternal(trajectory_id="a0", limit_s=10))
    made.handle(Ended(trajectory_id="a0"))
    assert not [e for e in made.cycle(100.0) if isinstance(e, GiveUp)]
    assert [e.step for e in made.handle(rewarded("a0")) if isinstance(e, Train)] == [0]


def test_an_end_with_a_complete_group_that_had_surplus_members() -> None:
    """The group's third member is long gone when the run ends before its batch is full."""
    made = control(naive(), batch_size=2, group_size=2)
    draw(made, ("a", 3))
    made.cycle(1.0)
    report(made, acked=3, finished=["a0", "a1"])
    made.handle(rewarded("a0"))
    dropped = [e.trajectory_ids for e in made.handle(rewarded("a1")) if isinstance(e, Discard)]
    assert dropped == [("a2",)]
    actions = made.handle(StopRequested())
    assert [e.trajectory_ids for e in actions if isinstance(e, Discard)] == [("a0", "a1")]
    assert [e.reason for e in actions if isinstance(e, Finish)] == ["interrupted"]


def test_a_stop_before_the_first_weights_ends_at_once() -> None:
    """There is no step to finish, and a trainer that never comes is not waited for."""
    made = Control(
        buffer=StalenessBuffer(bound=1, batch_size=2),
        coordinator=naive(),
        batches=BatchSettings(steps=5, group_size=2),
    )
    assert [e.reason for e in made.handle(StopRequested()) if isinstance(e, Finish)] == ["interrupted"]


def test_a_surplus_member_that_is_being_interrupted_gets_no_abort_as_well() -> None:
    """Its room on the instance would be counted as free twice."""
    hand = Hand(group_size=1, batch_size=1, patience=Patience(stall_after_s=2.0))
    hand.draw("a", members=2)
    hand.start("a")
    hand.report(finished={"a0": 5})
    hand.cycle()
    hand.cycle()
    assert [c.trajectory_id for c in hand.take(Interrupt)] == ["a1"]
    hand.reward("a0")
    assert hand.take(Abort) == []
    assert hand.control.view.resident("i0") == ()
    assert [d.trajectory_ids for d in hand.take(Discard)] == [("a1",)]


def surplus_of(*, done: str, waiting: int, told: int) -> Abort:
    """Of a group of two of which one is kept: the Abort of the other when `done` is rewarded, `waiting` of
    those on the instance wait inside it, and it has told of the first `told` Routes.
    """
    hand = Hand(batch_size=1, group_size=1)
    hand.draw("a", members=2)
    hand.start("a")
    left = TrajectoryReport(trajectory_id=done, length=9, min_version=0, finish_reason="stop")
    hand.tell(
        Reported(
            InstanceReport(
                instance="i0",
                incarnation=1,
                revision=1,
                version=0,
                acked_seq=told,
                finished=(left,),
                running=1 - waiting,
                waiting=waiting,
            )
        )
    )
    hand.tell(Rewarded(trajectory_id=done, raw=1.0, usable=True, token_hash="h"))
    (abort,) = hand.take(Abort)
    return abort


def test_aborting_what_only_waits_inside_an_instance_frees_no_kv() -> None:
    assert surplus_of(done="a0", waiting=1, told=2).length == 0
    assert surplus_of(done="a0", waiting=0, told=2).length == PROMPT


def test_what_the_instance_has_not_told_of_counts_as_its_route_did() -> None:
    """a1 was ordered after the report was written: the trajectory that waits there is another one."""
    assert surplus_of(done="a0", waiting=1, told=1).length == PROMPT


def test_a_free_trainer_takes_the_next_batch_before_its_weights_are_pushed_and_the_bound_holds() -> None:
    """η = 1: what waits at V = 0 may be trained in step 1; what comes after it needs version 1 pushed."""
    made = Control(
        buffer=StalenessBuffer(bound=1, batch_size=1),
        coordinator=naive(),
        batches=BatchSettings(steps=5, group_size=1),
    )
    made.handle(Pushed(version=0))
    made.handle(InstanceJoined(instance="i0", incarnation=1, version=0, kv_capacity=1000, max_running=8))
    draw(made, ("a", 1), ("b", 1))
    made.cycle(0.0)
    report(made, acked=2, finished=["a0", "b0"])
    first = made.handle(rewarded("a0"))
    assert [e.step for e in first if isinstance(e, Train)] == [0]
    assert not [e for e in made.handle(rewarded("b0")) if isinstance(e, Train)]
    free = made.handle(TrainerFree(version=1))
    assert [(e.step, e.groups) for e in free if isinstance(e, Train)] == [(1, (("b", ("b0",)),))]
    assert made.view.newest_version == 0
    assert not made._buffer.can_reserve(0)
    assert not [e for e in made.cycle(1.0) if isinstance(e, DrawGroups)]
    made.handle(Pushed(version=1))
    assert [e for e in made.cycle(2.0) if isinstance(e, DrawGroups)]
