"""Seconds are counted once each, under what was so while they passed."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_events import Time, received, report, teller

from staleflow.coordination.actions import Pull
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.telemetry.events import (
    BackFromEnvironment,
    BatchTaken,
    CommandSent,
    InstanceDown,
    LeftForEnvironment,
    PhaseBegan,
    RunBegan,
    StepTrained,
    TurnEnded,
)
from staleflow.telemetry.utilization import TimeUse


class Picture:
    """As much of `ControlView` as is looked at: what runs on each instance, and trajectories by state."""

    def __init__(self, *running: int, scoring: int = 0, outside: int = 0) -> None:
        self._running = running
        self._states = {
            TrajectoryState.RUNNING: sum(running),
            TrajectoryState.GENERATED: scoring,
            TrajectoryState.WAITING_EXTERNAL: outside,
        }

    def instances(self) -> tuple[str, ...]:
        return tuple(f"i{n}" for n in range(len(self._running)))

    def instance(self, name: str) -> Any:
        running = self._running[int(name[1:])]
        return report(name, running=running)

    def count(self, state: TrajectoryState) -> int:
        return self._states[state]


class Timed:
    """A `TimeUse` whose clock and view are set by hand. Counting begins at 0."""

    def __init__(self, *, started: bool = True) -> None:
        self._clock = Time()
        self.use = TimeUse(self._clock)
        self._tell = teller(self.use)
        if started:
            self.tell(0.0, PhaseBegan(phase="running"))

    def tell(self, now: float, event: Any) -> None:
        self._clock.now = now
        self._tell(event)

    def look(self, now: float, picture: Picture) -> None:
        view: Any = picture
        balance: Any = None
        self.tell(now, RunBegan(view=view, balance=balance))
        self.tell(now, TurnEnded(True))

    def take(self, now: float) -> dict[str, float]:
        self._clock.now = now
        return self.use.take()

    def waits(self, now: float) -> dict[str, float]:
        """Seconds by cause, those above 0."""
        values = self.take(now)
        causes = {
            k.split("/")[2].removesuffix("_s"): v
            for k, v in values.items()
            if k.startswith("time/waiting/") and v
        }
        assert sum(causes.values()) == pytest.approx(values["time/trainer_waiting_s"])
        return causes


BATCH = BatchTaken(step=0, groups=(), waited_s=0.0)
TRAINED = StepTrained(step=0, trained=(), metrics={}, update_s=0.0)


def pull(seq: int) -> CommandSent:
    return CommandSent(Pull(instance="i0", incarnation=1, seq=seq, version=1))


def test_idle_time_is_split_by_what_the_trainer_did() -> None:
    """Two instances, one idle; the trainer waits for 2 s, then trains; from 4 s on both are idle."""
    timed = Timed()
    timed.look(0.0, Picture(4, 0))
    timed.tell(2.0, BATCH)
    timed.look(4.0, Picture(0, 0))
    values = timed.take(5.0)
    assert values["time/step_s"] == 5.0
    assert values["time/instances_s"] == 10.0
    assert values["time/trainer_waiting_s"] == 2.0
    assert values["time/instances_idle_s"] == 2 + 2 + 2
    assert values["time/instances_idle_training_s"] == 2 + 2
    assert timed.use.idle_s_total == 6.0
    assert timed.take(5.0)["time/step_s"] == 0.0


def test_the_trainer_waits_from_the_end_of_a_step_to_the_next_batch() -> None:
    timed = Timed()
    timed.tell(1.0, BATCH)
    timed.tell(4.0, TRAINED)
    assert timed.take(4.5)["time/trainer_waiting_s"] == 1.0 + 0.5


def test_nothing_is_counted_before_the_start() -> None:
    timed = Timed(started=False)
    timed.tell(0.5, PhaseBegan(phase="starting"))
    timed.look(1.0, Picture(1))
    timed.tell(2.0, BATCH)
    timed.tell(3.0, TRAINED)
    assert set(timed.take(4.0).values()) == {0.0}


@pytest.mark.parametrize(
    ("picture", "cause"),
    [
        (Picture(20, 20), "rollout"),
        (Picture(10, 1), "rollout"),
        (Picture(10, 0), "longest"),
        (Picture(1, 0), "longest"),
        (Picture(1, 0, scoring=2), "reward"),
        (Picture(0, 0, scoring=1), "reward"),
        (Picture(2, 0, outside=3), "environment"),
        (Picture(0, 0), "routing"),
    ],
)
def test_the_trainer_waits_for_what_a_batch_is_missing(picture: Picture, cause: str) -> None:
    """At most 40 trajectories ever ran at once; a quarter of that is few."""
    timed = Timed()
    timed.look(0.0, Picture(20, 20))
    timed.look(0.1, picture)
    timed.take(0.1)
    assert timed.waits(3.1) == {cause: pytest.approx(3.0)}


def test_what_is_with_its_environment_is_not_being_scored() -> None:
    """Three have ended their turn: `a` is with its environment for 2 s, `b` for 5 s, then it is to wait."""
    timed = Timed()
    timed.tell(0.0, LeftForEnvironment(["a", "b"]))
    timed.look(0.0, Picture(0, scoring=3))  # 2 outside, 1 scored
    timed.tell(2.0, BackFromEnvironment("a"))
    timed.look(2.0, Picture(0, scoring=3))  # 1 outside, 2 scored
    timed.tell(5.0, BackFromEnvironment("b"))
    timed.look(5.0, Picture(0, scoring=1, outside=1))
    timed.tell(6.0, BackFromEnvironment("b"))  # asked again
    timed.look(6.0, Picture(0, scoring=1, outside=2))
    assert timed.waits(7.0) == {"environment": pytest.approx(2 + 1), "reward": pytest.approx(3 + 1)}


def test_instances_that_load_weights_are_what_is_waited_for_until_they_say_so() -> None:
    timed = Timed()
    timed.tell(0.0, pull(3))
    timed.look(0.0, Picture(4, 4))
    timed.tell(0.5, received(report(acked_seq=2)))
    timed.look(1.0, Picture(4, 4))
    timed.tell(1.5, received(report(acked_seq=3)))
    timed.look(2.0, Picture(4, 4))
    assert timed.waits(5.0) == {"pull": pytest.approx(2.0), "rollout": pytest.approx(3.0)}


def test_one_of_three_that_loads_weights_holds_nobody_up() -> None:
    timed = Timed()
    timed.tell(0.0, pull(1))
    timed.look(0.0, Picture(4, 4, 4))
    assert timed.waits(1.0) == {"rollout": 1.0}


def test_a_lost_instance_loads_nothing_any_more() -> None:
    timed = Timed()
    timed.tell(0.0, pull(1))
    timed.tell(0.0, InstanceDown(instance="i0", incarnation=1, reason="it died"))
    timed.look(0.0, Picture(4))
    assert timed.waits(1.0) == {"rollout": 1.0}
