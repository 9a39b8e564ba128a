"""A cluster of any size in front of one `Control`, without engines: every instance only reports.

What is real: `Control`, its coordinator and strategies, built from the config as in a run, and every event
it gets. What is made up: the instances, which decode at a fixed rate and apply each command by their next
report; the verifier, which answers by the next interval; the trainer. Their own work is never timed.

One interval is one turn of a run's loop: each instance reports once, with what finished on it, and once a
second also how long its trajectories have become; rewards come in; perhaps a step ends and is pushed; then
one cycle. The trajectory server is kept at `pending` waiting trajectories: as many fresh groups are given.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from staleflow.coordination.actions import (
    Abort,
    Action,
    Command,
    DrawGroups,
    Interrupt,
    Pull,
    Route,
    Score,
    Send,
    Train,
)
from staleflow.coordination.control import Control
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.events import (
    DrawnGroup,
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceReport,
    Pushed,
    Reported,
    Rewarded,
    TrainedStep,
    TrajectoryReport,
)
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import Trained
from staleflow.runtime.gc_tuning import Heap

INTERVAL_S = 0.05
"""`coordination.interval_ms` of the default config."""
PROGRESS_EVERY = 20
"""Intervals between two reports of lengths: `rollout.progress_interval_s` of the default config, 1 s."""
PROMPT_TOKENS = 500
TOKENS_PER_INTERVAL = 4
"""80 tokens a second for each trajectory."""
LIFE = 800
"""Mean intervals that a trajectory takes: 40 s, 3,200 tokens."""
SPREAD = 0.25
"""Lives are spread evenly by this share to both sides."""
GROUP_SIZE = 16
TRAINING_INTERVALS = 60
"""Intervals from a batch to the push of the next version."""


@dataclass(slots=True)
class _Trajectory:
    born: int
    """Interval in which it got to the instance."""
    length: int
    """Tokens that it came with."""
    version: int


@dataclass(slots=True)
class _Instance:
    name: str
    version: int
    resident: dict[str, _Trajectory] = field(default_factory=dict)
    inbox: list[Command] = field(default_factory=list)
    acked: int = 0
    revision: int = 0
    tokens_at_zero: int = 0
    """Sum over residents of the tokens each would have had at interval 0: so their sum costs nothing."""
    finished: list[TrajectoryReport] = field(default_factory=list)
    interrupted: list[TrajectoryReport] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    busy_seconds: float = 0.0
    running_steps: int = 0
    kv_token_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What one interval cost, in CPU seconds of this process."""

    cycle_s: float
    reports_s: float
    """`handle` of all reports together."""
    reports: int
    others_s: float
    """`handle` of rewards, fresh groups, trained steps and pushes together."""
    others: int
    commands: int
    heap_s: float
    """Settling the heap, as the run loop does while the trainer has work; 0 in most intervals."""


class SyntheticCluster:
    """See the module's docstring. First `cold_fill`, then any number of `interval`."""

    def __init__(
        self,
        control: Control,
        *,
        instances: int,
        max_running: int,
        kv_capacity: int,
        pending: int,
        costs: CostModel,
        seed: int = 0,
    ) -> None:
        self.control = control
        self.intervals = 0
        self.pushes = 0
        self._instances = {f"i{n}": _Instance(name=f"i{n}", version=0) for n in range(instances)}
        self._max_running = max_running
        self._kv_capacity = kv_capacity
        self._pending = pending
        self._costs = costs
        self._random = random.Random(seed)
        self._groups = 0
        self._ends: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        """(instance, trajectory) by the interval in which it finishes."""
        self._to_score: list[str] = []
        self._missing = 0
        """Groups to give, since Control asked for some."""
        self._trained_at: int | None = None
        self._train: Train | None = None
        self._heap = Heap()
        self._heap_is_due = False

    # ------------------------------------------------------------------ the two things measured

    def cold_fill(self) -> tuple[float, int]:
        """From an empty cluster to all Routes ordered: (CPU seconds in cycle, Routes)."""
        self._handle([Pushed(version=0)])
        self._handle(
            InstanceJoined(
                instance=name,
                incarnation=1,
                version=0,
                kv_capacity=self._kv_capacity,
                max_running=self._max_running,
            )
            for name in self._instances
        )
        wanted = len(self._instances) * self._max_running + self._pending
        self._give_groups(-(-wanted // GROUP_SIZE))
        seconds, routes = 0.0, 0
        while True:
            began = time.process_time()
            actions = self.control.cycle(self._now)
            seconds += time.process_time() - began
            fresh = sum(isinstance(e, Send) and isinstance(e.command, Route) for e in actions)
            self._perform(actions)
            if not fresh:
                break
            routes += fresh
        self._mix_ages()
        return seconds, routes

    def interval(self) -> Interval:
        """Let one interval pass."""
        self.intervals += 1
        reports: list[Event] = [Reported(report=self._report(i)) for i in self._finishing()]
        scored, self._to_score = self._to_score, []
        others: list[Event] = [
            Rewarded(trajectory_id=t, raw=float(n % 2), usable=True, token_hash="0123456789abcdef")
            for n, t in enumerate(scored)
        ]
        others += self._trainer()
        reports_s = self._handle(reports)
        others_s = self._handle(others)
        began = time.process_time()
        actions = self.control.cycle(self._now)
        cycle_s = time.process_time() - began
        self._perform(actions)
        heap_s = self._settle_heap()
        missing = (self._pending - self.control.view.count(TrajectoryState.PENDING)) // GROUP_SIZE
        if self._missing:
            others_s += self._give_groups(max(0, min(missing, self._missing)))
            others.append(Pushed(version=0))  # counts the GroupsDrawn
        return Interval(
            cycle_s=cycle_s,
            reports_s=reports_s,
            reports=len(reports),
            others_s=others_s,
            others=len(others),
            commands=sum(isinstance(e, Send) for e in actions),
            heap_s=heap_s,
        )

    # ------------------------------------------------------------------ instances

    @property
    def _now(self) -> float:
        return self.intervals * INTERVAL_S

    def _finishing(self) -> Iterable[_Instance]:
        for name, trajectory_id in self._ends.pop(self.intervals, ()):
            instance = self._instances[name]
            trajectory = instance.resident.get(trajectory_id)
            if trajectory is not None:  # else it was interrupted or aborted
                instance.finished.append(self._leave(instance, trajectory_id, "stop"))
        return self._instances.values()

    def _report(self, instance: _Instance) -> InstanceReport:
        for command in instance.inbox:
            self._apply(instance, command)
        instance.inbox.clear()
        instance.revision += 1
        running = len(instance.resident)
        kv_tokens = instance.tokens_at_zero + running * self.intervals * TOKENS_PER_INTERVAL
        instance.busy_seconds += TOKENS_PER_INTERVAL * self._costs.step_s(running, kv_tokens)
        instance.running_steps += running * TOKENS_PER_INTERVAL
        instance.kv_token_steps += kv_tokens * TOKENS_PER_INTERVAL
        tells_lengths = (self.intervals + int(instance.name[1:])) % PROGRESS_EVERY == 0
        report = InstanceReport(
            instance=instance.name,
            incarnation=1,
            revision=instance.revision,
            version=instance.version,
            acked_seq=instance.acked,
            finished=tuple(instance.finished),
            interrupted=tuple(instance.interrupted),
            aborted=tuple(instance.aborted),
            lengths=tuple((t, self._length(r)) for t, r in instance.resident.items())
            if tells_lengths
            else (),
            running=running,
            kv_tokens=kv_tokens,
            kv_capacity=self._kv_capacity,
            generated_tokens=instance.running_steps,
            busy_seconds=instance.busy_seconds,
            decode_steps=self.intervals * TOKENS_PER_INTERVAL,
            running_steps=instance.running_steps,
            kv_token_steps=instance.kv_token_steps,
        )
        for left in (instance.finished, instance.interrupted, instance.aborted):
            left.clear()
        return report

    def _apply(self, instance: _Instance, command: Command) -> None:
        match command:
            case Route():
                self._start(instance, command, self._life())
            case Interrupt(trajectory_id=trajectory_id) if trajectory_id in instance.resident:
                instance.interrupted.append(self._leave(instance, trajectory_id, None))
            case Abort(trajectory_id=trajectory_id) if trajectory_id in instance.resident:
                self._leave(instance, trajectory_id, None)
                instance.aborted.append(trajectory_id)
            case Pull(version=version):
                instance.version = version
        instance.acked = command.seq

    def _start(self, instance: _Instance, route: Route, left: int) -> None:
        instance.resident[route.trajectory_id] = _Trajectory(self.intervals, route.length, route.min_version)
        instance.tokens_at_zero += route.length - self.intervals * TOKENS_PER_INTERVAL
        self._ends[self.intervals + left].append((instance.name, route.trajectory_id))

    def _leave(self, instance: _Instance, trajectory_id: str, reason: str | None) -> TrajectoryReport:
        trajectory = instance.resident.pop(trajectory_id)
        instance.tokens_at_zero -= trajectory.length - trajectory.born * TOKENS_PER_INTERVAL
        return TrajectoryReport(
            trajectory_id=trajectory_id,
            length=self._length(trajectory),
            min_version=trajectory.version,
            finish_reason=reason,
        )

    def _length(self, trajectory: _Trajectory) -> int:
        return trajectory.length + (self.intervals - trajectory.born) * TOKENS_PER_INTERVAL

    def _life(self) -> int:
        return max(1, round(LIFE * self._random.uniform(1 - SPREAD, 1 + SPREAD)))

    def _mix_ages(self) -> None:
        """Take the filled cluster's Routes in as if each group had been under way for a while already."""
        ages: dict[str, float] = {}
        for instance in self._instances.values():
            for command in instance.inbox:
                assert isinstance(command, Route)
                age = ages.setdefault(command.group_id, self._random.random())
                self._start(instance, command, max(1, round(self._life() * age)))
                instance.acked = command.seq
            instance.inbox.clear()
        self._heap.settle()  # as the step before would have done

    # ------------------------------------------------------------------ verifier, trainer, prompts

    def _trainer(self) -> list[Event]:
        if self._trained_at != self.intervals or self._train is None:
            return []
        step, self._train = self._train.step, None
        self.pushes += 1
        return [
            TrainedStep(record=Trained(step=step, version=step, trajectories=())),
            Pushed(version=step + 1),
        ]

    def _settle_heap(self) -> float:
        if not self._heap_is_due:
            return 0.0
        self._heap_is_due = False
        began = time.process_time()
        self._heap.settle()
        return time.process_time() - began

    def _give_groups(self, count: int) -> float:
        first, self._groups = self._groups, self._groups + count
        self._missing = 0
        names = [f"e0-p{n}-a0" for n in range(first, first + count)]
        groups = tuple(
            DrawnGroup(
                group_id=name,
                members=tuple(f"{name}-m{m}" for m in range(GROUP_SIZE)),
                prompt_length=PROMPT_TOKENS,
            )
            for name in names
        )
        return self._handle([GroupsDrawn(groups=groups)])

    def _handle(self, events: Iterable[Event]) -> float:
        """CPU seconds that `Control` takes for these events."""
        events = list(events)
        actions: list[Action] = []
        handle = self.control.handle
        began = time.process_time()
        for event in events:
            actions += handle(event)
        seconds = time.process_time() - began
        self._perform(actions)
        return seconds

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(command=command):
                    self._instances[command.instance].inbox.append(command)
                case Score(trajectory_id=trajectory_id):
                    self._to_score.append(trajectory_id)
                case DrawGroups(count=count):
                    self._missing = count
                case Train():
                    self._heap_is_due = True
                    self._train = action
                    self._trained_at = self.intervals + TRAINING_INTERVALS
