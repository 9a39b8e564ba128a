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

Invariants: a payload delta is absorbed before the event that speaks of it; a record is in the ledger file
before the action that follows from it; messages of one moment come before its cycle; the loop itself decides
nothing about trajectories. It is the only driver of `Control`, whatever the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

from staleflow.coordination.actions import (
    DrawGroups,
    Finish,
    Train,
)
from staleflow.coordination.control import Control
from staleflow.coordination.events import (
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Pushed,
    Reported,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrainerFree,
)
from staleflow.data.instance_update import InstanceUpdate
from staleflow.errors import RunFailed, UserError
from staleflow.protocol.records import Record, Trained
from staleflow.runtime.backend import (
    B,
    Backend,
    EnvironmentsAnswered,
    Ledger,
    P,
    PartFailed,
    RewardsReady,
    TimeUp,
    TrainerUp,
    TrajectoryStore,
)
from staleflow.runtime.clock import Clock
from staleflow.runtime.control_driver import ControlDriver
from staleflow.runtime.loop_settings import LoopSettings
from staleflow.runtime.milestones import Checkpoints, Evaluations
from staleflow.runtime.orders import Orders
from staleflow.telemetry.events import (
    BatchTaken,
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    EventStream,
    InstanceDown,
    LoopClosed,
    PhaseBegan,
    ReportReceived,
    RunBegan,
    RunEnded,
    RunFinished,
    StepTrained,
    TurnEnded,
    WeightsPushed,
)


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
        self._view = control.view
        self._store = store
        self._backend = backend
        self._ledger = ledger
        self._opening = opening
        self._stream = stream
        self._clock = clock
        self._settings = settings
        self._settle = settle
        self._settle_is_due = False
        performers: dict[type, Callable[[Any], None]] = {}
        self._driver = ControlDriver(
            control,
            performers,
            stream=stream,
            clock=clock,
            interval_s=settings.interval_s,
        )
        self._tell = self._driver.tell
        self._orders = Orders(
            store=store,
            backend=backend,
            ledger=ledger,
            stream=stream,
            tell=self._tell,
            clock=clock,
            multi_turn=settings.multi_turn,
        )
        performers |= {
            **self._orders.performers(),
            DrawGroups: self._draw,
            Train: self._train,
            Finish: self._finish,
        }
        self._checkpoints = Checkpoints(backend, ledger, stream, every=settings.checkpoint_every)
        self._evaluations = Evaluations(
            backend,
            stream,
            every=settings.evaluate_every,
            steps=settings.steps,
            backlog=settings.evaluation_backlog,
        )
        self._receivers: dict[type, Callable[[Any], None]] = {
            InstanceUpdate: self._on_update,
            RewardsReady: lambda message: self._orders.rewarded(message.rewards),
            EnvironmentsAnswered: lambda message: self._orders.answered(message.answers),
            StepTrained: self._on_trained,
            WeightsPushed: self._on_pushed,
            TrainerUp: self._on_trainer_up,
            InstanceJoined: self._on_joined,
            InstanceDown: self._on_instance_down,
            CheckpointSaved: self._checkpoints.saved,
            Evaluated: self._evaluations.done,
            EvaluationFailed: self._evaluations.done,
            TimeUp: lambda _: self.halt(),
            PartFailed: self._on_failed,
        }
        self._stop = threading.Event()
        self._halted = False
        self._over = False
        """Finished, or halted."""
        self._version = -1
        """The newest one in the parameter server."""
        self._trained = -1
        """The trainer's: at most one ahead of it."""
        self._idle_since = clock.now()

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
            emit(RunBegan, view=self._view, balance=self._store.balance)
            self._driver.perform(self._control.note(self._opening))
            self._ledger.flush()
            emit(PhaseBegan, phase="starting")
            self._backend.start()
            self._wait_for_start()
            emit(PhaseBegan, phase="running")
            while not self._over:
                self._turn()
            self._wind_down()
            return self._view.finished or "time"
        finally:
            try:
                self._ledger.close()
                emit(LoopClosed)
            finally:  # a full disk must not leave processes behind
                self._backend.close()

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        """Take messages in until a cycle is due or nothing comes, and make the cycle."""
        driver, is_due = self._driver, False
        while not is_due and self._take_in():
            is_due = driver.now >= driver.cycle_at and not self._backend.more_now
        if self._over:
            return
        stops = self._stop.is_set() and not self._view.stopping
        if stops:
            driver.want_cycle(driver.now)
        is_due = driver.now >= driver.cycle_at
        if is_due:
            if stops:
                self._stream.emit(PhaseBegan, phase="finishing step")
                driver.tell(StopRequested())
            driver.cycle()
            self._orders.send(driver.now)
        self._stream.emit(TurnEnded, is_due)
        if self._settle_is_due:
            self._settle_is_due = False
            self._settle()

    def _take_in(self) -> bool:
        """Take in what comes next and act on it. False: nothing has come, or the run is over."""
        driver = self._driver
        until = driver.now + self._settings.idle_s
        if driver.cycle_at < until:
            until = driver.cycle_at
        if self._orders.due_at < until:
            until = self._orders.due_at
        messages = self._backend.poll(until)
        driver.now = self._clock.now()
        for message in messages:
            self._receivers[type(message)](message)
        if self._orders.due_at <= driver.now:
            self._orders.send(driver.now)
        return bool(messages) and not self._over

    def _wait_for_start(self) -> None:
        deadline = self._clock.now() + self._settings.start_timeout_s
        while self._version < 0 or not self._view.instances():
            if self._view.finished is not None:
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
            if self._checkpoints.ended(self._trained):
                self._stream.emit(PhaseBegan, phase="saving")
            while self._version < self._trained:  # the last push, which evaluation needs, and which may fail
                self._wait()
            if self._view.finished != "interrupted":
                self._evaluations.ended(self._version)
        while self._checkpoints.under_way or (self._evaluations.under_way and not self._stop.is_set()):
            if not self._checkpoints.under_way:
                self._stream.emit(PhaseBegan, phase="evaluating")
            self._wait()
        self._stream.emit(RunEnded)

    def _wait(self) -> None:
        """A turn in which nothing is decided any more."""
        for message in self._backend.poll(self._clock.now() + self._settings.idle_s):
            self._receivers[type(message)](message)
        self._stream.emit(TurnEnded, False)

    # ------------------------------------------------------------------ messages

    def _on_update(self, message: InstanceUpdate) -> None:
        late = self._store.absorb(message)
        self._stream.emit(ReportReceived, message.report, late, self._store.find)
        self._tell(Reported(message.report))

    def _on_joined(self, message: InstanceJoined) -> None:
        self._stream.tell(message)
        self._tell(message)

    def _on_failed(self, message: PartFailed) -> None:
        if message.blame_user:
            raise UserError(message.reason)
        raise RunFailed(f"{message.part} failed: {message.reason}")

    def _on_trained(self, message: StepTrained) -> None:
        step, version = message.step, message.step + 1
        self._tell(TrainedStep(record=Trained(step=step, version=step, trajectories=message.trained)))
        self._ledger.flush()
        self._store.trained(step)
        self._stream.tell(message)
        self._checkpoints.trained(version)
        self._trained, self._idle_since = version, self._clock.now()
        self._tell(TrainerFree(version=version))

    def _on_pushed(self, message: WeightsPushed) -> None:
        self._version = message.version
        self._stream.tell(message)
        self._evaluations.pushed(message.version)
        self._tell(Pushed(version=message.version))

    def _on_trainer_up(self, message: TrainerUp) -> None:
        version = self._trained = message.version
        self._idle_since = self._clock.now()
        self._on_pushed(WeightsPushed(version=version, seconds=message.push_s))
        self._evaluations.began(version)

    def _on_instance_down(self, message: InstanceDown) -> None:
        self._stream.tell(message)
        if self._view.is_current(message.instance, message.incarnation):
            resident = self._view.resident(message.instance)
            self._orders.void(message.instance)
            lost = InstanceLost(
                instance=message.instance,
                incarnation=message.incarnation,
                lengths=self._store.lengths(tuple(resident)),
                reason=message.reason,
            )
            self._stream.tell(lost)
            self._tell(lost)

    # ------------------------------------------------------------------ actions

    def _draw(self, action: DrawGroups) -> None:
        groups, exhausted = self._store.draw(action.count, padding=action.padding)
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

    def _finish(self, action: Finish) -> None:
        self._over = True
        self._ledger.flush(sync=True)
        self._stream.emit(RunFinished, reason=action.reason)
