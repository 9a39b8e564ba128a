"""Seconds are counted once each, under what was so while they passed."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.coordination.actions import Pull
from staleflow.coordination.events import InstanceReport
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.runtime.utilization import TimeUse


class Picture:
    """As much of `Control` as is looked at: what runs on each instance, and trajectories by state."""

    def __init__(self, *running: int, scoring: int = 0, outside: int = 0) -> None:
        self.view: Any = self
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
        return InstanceReport(
            instance=name, incarnation=1, revision=1, version=0, acked_seq=0, running=running
        )

    def count(self, state: TrajectoryState) -> int:
        return self._states[state]


def look(use: TimeUse, now: float, picture: Picture) -> None:
    use.look(now, picture)  # type: ignore[arg-type]


def waits(use: TimeUse, now: float) -> dict[str, float]:
    """Seconds by cause, those above 0."""
    values = use.take(now)
    causes = {
        k.split("/")[2].removesuffix("_s"): float(v)
        for k, v in values.items()
        if k.startswith("time/waiting/") and v
    }
    assert sum(causes.values()) == pytest.approx(values["time/trainer_waiting_s"])
    return causes


def pull(seq: int) -> Pull:
    return Pull(instance="i0", incarnation=1, seq=seq, version=1)


def acknowledged(seq: int) -> InstanceReport:
    return InstanceReport(instance="i0", incarnation=1, revision=1, version=1, acked_seq=seq)


def test_idle_time_is_split_by_what_the_trainer_did() -> None:
    """Two instances, one idle; the trainer waits for 2 s, then trains; from 4 s on both are idle."""
    use = TimeUse()
    use.start(0.0)
    look(use, 0.0, Picture(4, 0))
    use.training(2.0, True)
    look(use, 4.0, Picture(0, 0))
    values = use.take(5.0)
    assert values["time/step_s"] == 5.0
    assert values["time/instances_s"] == 10.0
    assert values["time/trainer_waiting_s"] == 2.0
    assert values["time/instances_idle_s"] == 2 + 2 + 2
    assert values["time/instances_idle_training_s"] == 2 + 2
    assert use.idle_s_total == 6.0
    assert use.take(5.0)["time/step_s"] == 0.0


def test_nothing_is_counted_before_the_start() -> None:
    use = TimeUse()
    look(use, 1.0, Picture(1))
    use.training(2.0, True)
    use.training(3.0, False)
    assert set(use.take(4.0).values()) == {0.0}


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
    use = TimeUse()
    use.start(0.0)
    look(use, 0.0, Picture(20, 20))
    use.take(0.0)
    look(use, 0.1, picture)
    use.take(0.1)
    assert waits(use, 3.1) == {cause: pytest.approx(3.0)}


def test_instances_that_load_weights_are_what_is_waited_for_until_they_say_so() -> None:
    use = TimeUse()
    use.start(0.0)
    use.ordered(pull(3))
    look(use, 0.0, Picture(4, 4))
    use.reported(acknowledged(2))
    look(use, 1.0, Picture(4, 4))
    use.reported(acknowledged(3))
    look(use, 2.0, Picture(4, 4))
    assert waits(use, 5.0) == {"pull": pytest.approx(2.0), "rollout": pytest.approx(3.0)}


def test_one_of_three_that_loads_weights_holds_nobody_up() -> None:
    use = TimeUse()
    use.start(0.0)
    use.ordered(pull(1))
    look(use, 0.0, Picture(4, 4, 4))
    assert waits(use, 1.0) == {"rollout": 1.0}


def test_a_lost_instance_loads_nothing_any_more() -> None:
    use = TimeUse()
    use.start(0.0)
    use.ordered(pull(1))
    use.lost("i0")
    look(use, 0.0, Picture(4))
    assert waits(use, 1.0) == {"rollout": 1.0}
