"""Who worked and who stood still, and while the trainer stood still, for what it waited.

Invariants: every second from the phase `running` on is counted once, under the state of the moment before
it; the causes of waiting sum to the trainer's waiting; a row holds the seconds since the last row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from staleflow.coordination.actions import Pull
from staleflow.coordination.view import ControlView
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.telemetry.events import (
    BackFromEnvironment,
    BatchTaken,
    CommandSent,
    Handlers,
    InstanceDown,
    LeftForEnvironment,
    PhaseBegan,
    ReportReceived,
    RunBegan,
    StepTrained,
    TurnEnded,
)

LOOK_EVERY_S = 0.02
"""A look is O(instances); this is finer than any figure that is shown."""
FEW_RUNNING = 0.25
"""With no more than this share of the most that ever ran at once, only the longest responses still run."""

Cause = Literal["rollout", "longest", "reward", "pull", "routing", "environment"]
"""rollout: the instances are at work; longest: few trajectories still run; reward: more trajectories are
being scored than run; pull: at least half of the instances load weights; routing: nothing runs, is scored or
loaded; environment: more wait for their environment than run or are scored."""
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
    """A listener that counts seconds by what they were spent on."""

    def __init__(self, now: Callable[[], float], look_every_s: float = LOOK_EVERY_S) -> None:
        """`now`: the run's clock."""
        self._now = now
        self._look_every_s = look_every_s
        self._view: ControlView
        self._at: float | None = None
        self._looked = float("-inf")
        self._moment = _Moment()
        self._most_running = 0
        self._pulls: dict[str, int] = {}
        self._asked: set[str] = set()
        """Trajectories with their environment, which Control counts as generated until it says Waiting."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.idle_s_total = 0.0
        """Instance seconds with nothing running, in this attempt."""

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            RunBegan: self._began,
            PhaseBegan: self._phase,
            CommandSent: self._sent,
            ReportReceived: self._reported,
            InstanceDown: self._down,
            LeftForEnvironment: lambda event: self._asked.update(event.trajectory_ids),
            BackFromEnvironment: lambda event: self._asked.discard(event.trajectory_id),
            BatchTaken: lambda _: self._training(True),
            StepTrained: lambda _: self._training(False),
            TurnEnded: self._turned,
        }

    def _began(self, event: RunBegan) -> None:
        self._view = event.view

    def _phase(self, event: PhaseBegan) -> None:
        """All parts are up in the phase `running`: counting begins."""
        if event.phase == "running":
            self._at = self._now()

    def _sent(self, event: CommandSent) -> None:
        if isinstance(event.command, Pull):
            self._pulls[event.command.instance] = event.command.seq

    def _reported(self, event: ReportReceived) -> None:
        report = event.report
        if report.acked_seq >= self._pulls.get(report.instance, report.acked_seq + 1):
            del self._pulls[report.instance]

    def _down(self, event: InstanceDown) -> None:
        self._pulls.pop(event.instance, None)

    def _training(self, training: bool) -> None:
        self._count(self._now())
        self._moment.training = training

    def _turned(self, _: TurnEnded) -> None:
        """Count the time since the last look, and note the state from now on."""
        now = self._now()
        if self._at is None or now - self._looked < self._look_every_s:
            return
        self._looked = now
        self._count(now)
        names = self._view.instances()
        self._moment.up = len(names)
        self._moment.idle = sum(_is_idle(self._view, name) for name in names)
        self._moment.cause = self._cause()

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by name."""
        self._count(self._now())
        names = (*_SIDES, *(f"waiting/{cause}_s" for cause in get_args(Cause)))
        values = {f"time/{name}": self._seconds[name] for name in names}
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

    def _cause(self) -> Cause:
        """For what a batch is missing at this moment, whether or not the trainer waits for one."""
        count = self._view.count
        running, asked = count(TrajectoryState.RUNNING), len(self._asked)
        scoring = count(TrajectoryState.GENERATED) - asked
        outside = count(TrajectoryState.WAITING_EXTERNAL) + asked
        self._most_running = max(self._most_running, running)
        if self._pulls and 2 * len(self._pulls) >= len(self._view.instances()):
            return "pull"
        if outside > running + scoring:
            return "environment"
        if scoring > running:
            return "reward"
        if running == 0:
            return "routing"
        return "longest" if running <= FEW_RUNNING * self._most_running else "rollout"


def _is_idle(view: ControlView, instance: str) -> bool:
    snapshot = view.instance(instance)
    return snapshot.running + snapshot.waiting == 0
