"""Who worked and who stood still, and while the trainer stood still, for what it waited.

Invariants: every second from `start` on is counted once, under the state of the moment before it; the causes
of waiting sum to the trainer's waiting; a row holds the seconds since the last row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, get_args

from staleflow.coordination.actions import Command, Pull
from staleflow.coordination.control import Control
from staleflow.coordination.events import InstanceReport
from staleflow.protocol.lifecycle import TrajectoryState

LOOK_EVERY_S = 0.02
"""Looking costs time per instance; this is finer than any figure that is shown."""
FEW_RUNNING = 0.25
"""With no more than this share of the most that ever ran at once, only the longest responses still run."""

Cause = Literal["rollout", "longest", "reward", "pull", "routing", "environment"]
"""rollout: the instances are at work; longest: few trajectories still run; reward: more trajectories are
being scored than run; pull: at least half of the instances load weights; routing: nothing runs, is scored or
loaded; environment: answers from outside are awaited."""
_SIDES = (
    "step_s",
    "instances_s",
    "instances_idle_s",
    "instances_idle_training_s",
    "trainer_waiting_s",
)


@dataclass(slots=True)
class _Moment:
    """The state that time is counted under."""

    up: int = 0
    idle: int = 0
    training: bool = False
    cause: Cause = "rollout"


class TimeUse:
    """Seconds by what they were spent on. Fed by the observer."""

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._at: float | None = None
        self._looked = float("-inf")
        self._moment = _Moment()
        self._most_running = 0
        self._pulls: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.idle_s_total = 0.0
        """Instance seconds with nothing running, in this attempt."""

    def start(self, now: float) -> None:
        """All parts are up: counting begins."""
        self._at = now

    def ordered(self, command: Command) -> None:
        """A command goes out."""
        if isinstance(command, Pull):
            self._pulls[command.instance] = command.seq

    def reported(self, report: InstanceReport) -> None:
        """An instance acknowledged commands."""
        if report.acked_seq >= self._pulls.get(report.instance, report.acked_seq + 1):
            del self._pulls[report.instance]

    def lost(self, instance: str) -> None:
        """What an instance was ordered is void."""
        self._pulls.pop(instance, None)

    def training(self, now: float, training: bool) -> None:
        """The trainer began, or ended, a step with its push."""
        self._count(now)
        self._moment.training = training

    def look(self, now: float, control: Control) -> None:
        """Count the time since the last look, and note the state from now on."""
        if self._at is None or now - self._looked < self._look_every_s:
            return
        self._looked = now
        self._count(now)
        names = control.view.instances()
        self._moment.up = len(names)
        self._moment.idle = sum(_nothing_there(control, name) for name in names)
        self._moment.cause = self._cause(control)

    def take(self, now: float) -> dict[str, float | int | str]:
        """Seconds since the last call, by name."""
        self._count(now)
        names = (*_SIDES, *(f"waiting/{cause}_s" for cause in get_args(Cause)))
        values: dict[str, float | int | str] = {f"time/{name}": self._seconds[name] for name in names}
        self._seconds.clear()
        return values

    def _count(self, now: float) -> None:
        if self._at is None:
            return
        elapsed, moment, seconds = max(0.0, now - self._at), self._moment, self._seconds
        self._at = max(self._at, now)
        seconds["step_s"] += elapsed
        seconds["instances_s"] += elapsed * moment.up
        seconds["instances_idle_s"] += elapsed * moment.idle
        self.idle_s_total += elapsed * moment.idle
        if moment.training:
            seconds["instances_idle_training_s"] += elapsed * moment.idle
        else:
            seconds["trainer_waiting_s"] += elapsed
            seconds[f"waiting/{moment.cause}_s"] += elapsed

    def _cause(self, control: Control) -> Cause:
        """For what a batch is missing at this moment, whether or not the trainer waits for one."""
        count = control.view.count
        running, scoring = count(TrajectoryState.RUNNING), count(TrajectoryState.GENERATED)
        outside = count(TrajectoryState.WAITING_EXTERNAL)
        self._most_running = max(self._most_running, running)
        if self._pulls and 2 * len(self._pulls) >= len(control.view.instances()):
            return "pull"
        if outside > running + scoring:
            return "environment"
        if scoring > running:
            return "reward"
        if running == 0:
            return "routing"
        return "longest" if running <= FEW_RUNNING * self._most_running else "rollout"


def _nothing_there(control: Control, instance: str) -> bool:
    snapshot = control.view.instance(instance)
    return snapshot.running + snapshot.waiting == 0
