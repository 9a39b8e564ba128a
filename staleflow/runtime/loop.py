"""The run loop: messages of the parts become events, actions become orders to the parts.

Flow and backpressure::

    backend.poll ──messages──> RunLoop ──events──> Control ──actions──> RunLoop ──orders──> backend
                                  │                    │
                           trajectory store         ledger (flushed before a batch is handed out)
                                  │
                             event stream ──> journal, metrics, status, statistics

    rollout runs ahead of training only as far as Control draws and routes; the trainer has one batch
    at a time; a checkpoint is written after a step, before the next batch is trained. A push runs behind the
    passes of the next step, whose update waits for it.

A coordination cycle follows news, at the earliest `interval_s` after the last one unless something stands
still until it, and the time that `Control` asks to be woken at.

Invariants: a payload delta is absorbed before the event that speaks of it; a record is in the ledger file
before the action that follows from it; messages of one moment come before its cycle; the loop itself decides
nothing about trajectories. It is the only driver of `Control`, whatever the backend.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from staleflow.coordination.actions import (
    Action,
    Append,
    Discard,
    DrawGroups,
    Finish,
    GiveUp,
    Resample,
    Score,
    Send,
    Train,
    Truncate,
)
from staleflow.coordination.commands import Command
from staleflow.coordination.control import Control
from staleflow.coordination.events import (
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrainerFree,
)
from staleflow.data.trajectory import FAILED, FinishReason, Reward
from staleflow.errors import RunFailed, UserError
from staleflow.protocol.records import Record, Trained
from staleflow.rollout.instance import InstanceUpdate
from staleflow.runtime.backend import (
    B,
    Backend,
    EnvironmentsAnswered,
    Message,
    P,
    PartFailed,
    RewardsReady,
    TimeUp,
    TrainerUp,
    TrajectoryStore,
)
from staleflow.runtime.clock import Clock
from staleflow.runtime.evaluation_turns import EvaluationTurns
from staleflow.runtime.turns import TurnEnds
from staleflow.telemetry.events import (
    BatchTaken,
    CheckpointSaved,
    CommandSent,
    ControlRan,
    Evaluated,
    EvaluationFailed,
    EvaluationSkipped,
    EventStream,
    GenerationEnded,
    GivenUp,
    InstanceDown,
    PhaseBegan,
    RecordAppended,
    Released,
    ReportReceived,
    RewardReceived,
    RunBegan,
    RunEnded,
    RunFinished,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
    WeightsPushed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the loop needs to know of the config."""

    steps: int
    interval_s: float
    """Least time between two coordination cycles, unless something stands still until the next one."""
    idle_s: float
    """Longest time that a poll waits: how soon a stop from outside is noticed. inf: until a message comes."""
    evaluate_every: int
    """Training steps between evaluations; 0: none."""
    evaluation_backlog: int
    """Versions that may wait while another is evaluated."""
    checkpoint_every: int | None
    """Training steps between checkpoints; 0: only at the end; None: never."""
    start_timeout_s: float
    urgent_at_once: bool = True
    multi_turn: bool = False
    """An environment is asked what follows when the model has ended its turn."""


class Ledger(Protocol):
    """Where records go: `storage.LedgerWriter`."""

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Append a record."""
        ...

    def flush(self, *, sync: bool = False) -> None:
        """Hand everything to the operating system; `sync`: to the disk."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class RunLoop(Generic[P, B]):
    """One attempt of a run, from start to Finish. `run` may be called once."""

    def __init__(
        self,
        *,
        control: Control,
        store: TrajectoryStore[P, B],
        backend: Backend[P, B],
        ledger: Ledger,
        opening: Record,
        stream: EventStream,
        clock: Clock,
        settings: LoopSettings,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`opening` is the record that begins this attempt: Start, or Resume. `settle` is called once a step,
        while the trainer has work.
        """
        self._control = control
        self._store = store
        self._backend = backend
        self._ledger = ledger
        self._opening = opening
        self._stream = stream
        self._clock = clock
        self._settings = settings
        self._settle = settle
        self._settle_is_due = False
        self._handle = self._timed_handle if stream.has(ControlRan) else control.handle
        self._idle_s = settings.idle_s
        self._events: deque[Event] = deque()
        self._working = False
        self._outgoing: dict[str, list[Command]] = {}
        self._to_score: list[P] = []
        self._turns = TurnEnds(store, stream, self._tell, clock, multi_turn=settings.multi_turn)
        self._stop = threading.Event()
        self._halted = False
        self._over = False
        """Finished, or halted."""
        self._evaluations = EvaluationTurns(
            every=settings.evaluate_every, steps=settings.steps, backlog=settings.evaluation_backlog
        )
        self._last_evaluated = -1
        self._saving: set[int] = set()
        self._version = -1
        """The newest one in the parameter server."""
        self._trained = -1
        """The trainer's: at most one ahead of it."""
        self._saved = -1
        self._now = self._idle_since = clock.now()
        """When this turn began to act: the clock, read once."""
        self._cycle_at = math.inf
        self._cycled_at = -math.inf

    def request_stop(self) -> None:
        """Finish the step in training, save and end. Safe to call from another thread."""
        self._stop.set()

    def halt(self) -> None:
        """Go no further than this moment: `run` returns `time`. For listeners."""
        self._halted = self._over = True

    def run(self) -> str:
        """Run to the end; returns the finish reason. Raises RunFailed when a part is gone for good."""
        emit = self._stream.emit
        try:
            emit(RunBegan, control=self._control, balance=self._store.balance)
            self._perform(self._control.note(self._opening))
            self._ledger.flush()
            emit(PhaseBegan, phase="starting")
            self._backend.start()
            self._wait_for_start()
            emit(PhaseBegan, phase="running")
            while not self._over:
                self._turn()
            self._wind_down()
            return self._control.finished or "time"
        finally:
            try:
                self._ledger.close()
            finally:  # a full disk must not leave processes behind
                self._backend.close()

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        """Take messages in until a cycle is due or nothing comes, and make the cycle."""
        is_due = False
        while not is_due and self._take_in():
            is_due = self._now >= self._cycle_at and not self._backend.more_now
        if self._over:
            return
        if self._stop.is_set() and not self._control.batches.stopping:
            self._want_cycle(self._now)
        is_due = self._now >= self._cycle_at
        if is_due:
            self._cycle()
            self._send_off()
        self._stream.emit(TurnEnded, is_due)
        if self._settle_is_due:
            self._settle_is_due = False
            self._settle()

    def _take_in(self) -> bool:
        """Take in what comes next and act on it. False: nothing has come, or the run is over."""
        until = self._now + self._idle_s
        if self._cycle_at < until:
            until = self._cycle_at
        if self._turns.next_at < until:
            until = self._turns.next_at
        messages = self._backend.poll(until)
        self._now = self._clock.now()
        for message in messages:
            self._receive(message)
        if self._to_score or self._outgoing or self._turns.next_at <= self._now:
            self._send_off()
        return bool(messages) and not self._over

    def _cycle(self) -> None:
        now = self._now = self._cycled_at = self._clock.now()
        self._cycle_at = math.inf
        if self._stop.is_set() and not self._control.batches.stopping:
            self._stream.emit(PhaseBegan, phase="finishing step")
            self._tell(StopRequested())
        began = self._clock.cpu()
        actions = self._control.cycle(now)
        self._stream.emit(ControlRan, self._clock.cpu() - began, True)
        self._perform(actions)
        wake_at = self._control.wake_at
        if wake_at is not None:
            self._want_cycle(wake_at)

    def _want_cycle(self, at: float) -> None:
        if not (self._control.urgent and self._settings.urgent_at_once):
            at = max(at, self._cycled_at + self._settings.interval_s)
        if at < self._cycle_at:
            self._cycle_at = at

    def _wait_for_start(self) -> None:
        deadline = self._clock.now() + self._settings.start_timeout_s
        while self._version < 0 or not self._control.fleet.names():
            if self._control.finished is not None:
                return  # stopped before anything was up
            if self._clock.now() > deadline:
                missing = "the trainer" if self._version < 0 else "every rollout instance"
                raise RunFailed(
                    f"{missing} did not start within cluster.start_timeout_s = "
                    f"{self._settings.start_timeout_s:g} s; see the logs folder of the run"
                )
            self._turn()

    def _wind_down(self) -> None:
        """After Finish: last evaluation, last checkpoint, then nothing is under way."""
        if self._trained >= 0 and not self._halted:
            if self._saved < self._trained and self._settings.checkpoint_every is not None:
                self._stream.emit(PhaseBegan, phase="saving")
                self._save(self._trained)
            while self._version < self._trained:  # the last push, which evaluation needs, and which may fail
                self._wait()
            stopped = self._control.finished == "interrupted"
            if self._settings.evaluate_every and not stopped and self._last_evaluated < self._version:
                self._evaluate(self._version)
        while self._saving or (self._evaluations.are_left and not self._stop.is_set()):
            if not self._saving:
                self._stream.emit(PhaseBegan, phase="evaluating")
            self._wait()
        self._stream.emit(RunEnded)

    def _wait(self) -> None:
        """A turn in which nothing is decided any more."""
        for message in self._backend.poll(self._clock.now() + self._settings.idle_s):
            self._receive(message)
        self._stream.emit(TurnEnded, False)

    # ------------------------------------------------------------------ messages

    def _receive(self, message: Message) -> None:
        match message:
            case InstanceUpdate():
                late = self._store.absorb(message)
                self._stream.emit(ReportReceived, message.report, late, self._store.find)
                self._tell(Reported(message.report))
            case RewardsReady():
                self._on_rewards(message.rewards)
            case EnvironmentsAnswered():
                for trajectory_id, answer in message.answers:
                    self._keep(self._turns.answered(trajectory_id, answer))
            case StepTrained():
                self._on_trained(message)
            case WeightsPushed():
                self._on_pushed(message)
            case TrainerUp():
                self._on_trainer_up(message)
            case InstanceJoined():
                self._stream.tell(message)
                self._tell(message)
            case InstanceDown():
                self._on_instance_down(message)
            case CheckpointSaved():
                self._saving.discard(message.version)
                self._saved = message.version
                self._stream.tell(message)
            case Evaluated() | EvaluationFailed():
                self._evaluations.done(message.version)
                if isinstance(message, Evaluated):
                    self._last_evaluated = max(self._last_evaluated, message.version)
                self._stream.tell(message)
                self._start_evaluation()
            case TimeUp():
                self.halt()
            case PartFailed(part=part, reason=reason, blame_user=blame_user):
                raise UserError(reason) if blame_user else RunFailed(f"{part} failed: {reason}")

    def _on_rewards(self, rewards: Sequence[tuple[str, Reward]]) -> None:
        for trajectory_id, reward in rewards:
            dropped = self._store.find(trajectory_id) is None
            self._stream.emit(RewardReceived, trajectory_id, reward, dropped)
            if not dropped:
                hashed = self._store.rewarded(trajectory_id, reward)
                self._tell(Rewarded(trajectory_id, reward.raw, reward.usable, hashed))

    def _on_trained(self, message: StepTrained) -> None:
        step, version = message.step, message.step + 1
        self._tell(TrainedStep(record=Trained(step=step, version=step, trajectories=message.trained)))
        self._ledger.flush()
        self._store.trained(step)
        self._stream.tell(message)
        every = self._settings.checkpoint_every
        if every and version % every == 0:
            self._save(version)
        self._trained, self._idle_since = version, self._clock.now()
        self._tell(TrainerFree(version=version))

    def _on_pushed(self, message: WeightsPushed) -> None:
        self._version = message.version
        self._stream.tell(message)
        if self._evaluations.is_due(message.version):
            self._evaluate(message.version)
        self._tell(Pushed(version=message.version))

    def _on_trainer_up(self, message: TrainerUp) -> None:
        version = self._trained = message.version
        self._idle_since = self._clock.now()
        self._on_pushed(WeightsPushed(version=version, seconds=message.push_s))
        if self._settings.evaluate_every and version < self._settings.steps:
            self._evaluate(version)

    def _on_instance_down(self, message: InstanceDown) -> None:
        self._stream.tell(message)
        if self._control.fleet.is_current(message.instance, message.incarnation):
            resident = self._control.fleet.resident(message.instance)
            self._outgoing.pop(message.instance, None)
            lost = InstanceLost(
                instance=message.instance,
                incarnation=message.incarnation,
                lengths=self._store.lengths(tuple(resident)),
                reason=message.reason,
            )
            self._stream.tell(lost)
            self._tell(lost)

    # ------------------------------------------------------------------ actions

    def _tell(self, event: Event) -> None:
        """Tell Control an event. While actions are performed, it waits for the rest of them."""
        if self._working:
            self._events.append(event)
            return
        actions = self._handle(event)
        if actions:
            self._perform(actions)
        elif isinstance(event, Rewarded):
            return  # its group is not complete: there is nothing new to decide on
        self._want_cycle(self._now)

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, then the events that come up, one after the other.

        An event that comes up while actions are performed waits for the rest of them, so that ledger records
        are written in the order of their numbers.
        """
        self._working = True
        self._apply(actions)
        while self._events:
            event = self._events.popleft()
            self._apply(self._handle(event))
            self._want_cycle(self._now)
        self._working = False

    def _timed_handle(self, event: Event) -> Sequence[Action]:
        began = self._clock.cpu()
        actions = self._control.handle(event)
        self._stream.emit(ControlRan, self._clock.cpu() - began, False)
        return actions

    def _apply(self, actions: Sequence[Action]) -> None:
        emit = self._stream.emit
        for action in actions:
            match action:
                case Append(record=record, seq=seq, attempt=attempt):
                    self._ledger.append(record, seq, attempt)
                    emit(RecordAppended, seq)
                case Send(command=command):
                    emit(CommandSent, command)
                    self._outgoing.setdefault(command.instance, []).append(command)
                case Score(trajectory_id=trajectory_id):
                    self._keep(self._turns.ended(trajectory_id))
                case DrawGroups(count=count, padding=padding):
                    self._draw(count, padding)
                case Discard(trajectory_ids=ids, reason=reason):
                    emit(Released, self._store.discard(ids, reason), reason)
                case GiveUp(trajectory_id=trajectory_id, reason=reason):
                    self._store.give_up(trajectory_id)
                    emit(GivenUp, trajectory_id=trajectory_id, reason=reason)
                case Resample(trajectory_id=trajectory_id, new_id=new_id, reason=reason):
                    dropped = self._store.resample(trajectory_id, new_id)
                    emit(StragglerResampled, dropped=dropped, new_id=new_id, reason=reason)
                case Truncate(trajectory_id=trajectory_id, reason=reason):
                    cut = self._store.truncate(trajectory_id)
                    emit(StragglerTruncated, trajectory=cut, reason=reason)
                case Train():
                    self._train(action)
                case Finish(reason=reason):
                    self._over = True
                    self._ledger.flush(sync=True)
                    emit(RunFinished, reason=reason)

    def _keep(self, complete: P | None) -> None:
        """A trajectory to be scored when this turn's orders go out, or None."""
        if complete is not None:
            self._stream.emit(GenerationEnded, complete)
            if complete.finish_reason is FinishReason.FAILED:
                self._on_rewards(((complete.trajectory_id, FAILED),))
            else:
                self._to_score.append(complete)

    def _draw(self, count: int, padding: bool) -> None:
        groups, exhausted = self._store.draw(count, padding=padding)
        drawn = GroupsDrawn(groups=groups)
        self._stream.tell(drawn)
        self._tell(drawn)
        if exhausted:
            self._tell(SourceExhausted())

    def _train(self, action: Train) -> None:
        self._ledger.flush()
        batch = self._store.batch(action.step, action.groups, action.final)
        waited_s = self._clock.now() - self._idle_since
        self._stream.emit(BatchTaken, step=batch.step, groups=batch.groups, waited_s=waited_s)
        self._backend.train(batch, hold=self._evaluations.is_due(action.step + 1))
        self._settle_is_due = True

    def _send_off(self) -> None:
        """Send what was decided: one message each for rewards, environments and every instance."""
        if self._to_score:
            complete, self._to_score = self._to_score, []
            self._backend.score(complete)
        if self._turns.next_at <= self._now:
            self._backend.respond(self._turns.take(self._now))
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, {}
            for instance, commands in outgoing.items():
                self._backend.deliver(instance, commands, self._store.payloads(commands))

    # ------------------------------------------------------------------ evaluation and checkpoints

    def _evaluate(self, version: int) -> None:
        skipped = self._evaluations.ask(version)
        if skipped is not None:
            self._backend.release(skipped)
            self._stream.emit(EvaluationSkipped, version=skipped)
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        version = self._evaluations.start()
        if version is not None:
            self._backend.evaluate(version)

    def _save(self, version: int) -> None:
        if version not in self._saving:
            self._saving.add(version)
            self._ledger.flush(sync=True)  # a checkpoint never outlives the records of its steps
            self._backend.save(version)
