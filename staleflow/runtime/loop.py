"""The run loop: messages of the parts become events, actions become orders to the parts.

Flow and backpressure::

    backend.poll ──messages──> RunLoop ──events──> Control ──actions──> RunLoop ──orders──> backend
                                  │                    │
                           TrajectoryServer         ledger (flushed before a batch is handed out)

    rollout runs ahead of training only as far as Control draws and routes; the trainer has one batch
    at a time; a checkpoint is written after a step, before the next batch is trained. A push runs behind the
    passes of the next step, whose update waits for it.

Invariants: a payload delta is absorbed before the event that speaks of it; a record is in the ledger file
before the action that follows from it; the loop itself decides nothing about trajectories.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.coordination.actions import (
    Action,
    Append,
    Command,
    Discard,
    DrawGroups,
    Finish,
    GiveUp,
    Resample,
    Route,
    Score,
    Send,
    Train,
    Truncate,
)
from staleflow.coordination.control import Control
from staleflow.coordination.events import (
    Ended,
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrainerFree,
    TurnGiven,
    WaitingExternal,
)
from staleflow.data.environment import Done, Environment, Waiting
from staleflow.data.trajectory import FinishReason, token_hash
from staleflow.errors import RunFailed, UserError
from staleflow.protocol.records import Record, Trained, TrainedMember
from staleflow.runtime.backend import (
    Backend,
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    InstanceDown,
    InstanceUpdated,
    Message,
    PartFailed,
    Scored,
    StepTrained,
    TrainerUp,
    WeightsPushed,
)
from staleflow.runtime.clock import Clock
from staleflow.runtime.evaluation_turns import EvaluationTurns
from staleflow.runtime.gc_tuning import Heap
from staleflow.runtime.length_counts import Late
from staleflow.runtime.observer import Observer
from staleflow.servers.trajectory_server import FAILED, TrajectoryServer
from staleflow.storage.journal import JournalWriter
from staleflow.storage.ledger import LedgerWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the loop needs to know of the config."""

    steps: int
    least_gap_s: float
    """Between two coordination cycles, unless something stands still until the next one."""
    interval_s: float
    """Longest time between two coordination cycles."""
    evaluate_every: int
    """Training steps between evaluations; 0: none."""
    evaluation_backlog: int
    """Versions that may wait while another is evaluated."""
    checkpoint_every: int
    """Training steps between checkpoints; 0: only at the end."""
    start_timeout_s: float


class RunLoop:
    """One attempt of a run, from start to Finish. `run` may be called once."""

    def __init__(
        self,
        *,
        control: Control,
        server: TrajectoryServer,
        environment: Environment,
        backend: Backend,
        ledger: LedgerWriter,
        opening: Record,
        observer: Observer,
        clock: Clock,
        settings: LoopSettings,
        journal: JournalWriter | None = None,
        heap: Heap | None = None,
    ) -> None:
        """`opening` is the record that begins this attempt: Start, or Resume. `heap`: that of this process,
        where the process is the loop's own.
        """
        self._control = control
        self._server = server
        self._environment = environment
        self._backend = backend
        self._ledger = ledger
        self._opening = opening
        self._observer = observer
        self._clock = clock
        self._settings = settings
        self._journal = journal or JournalWriter(None)
        self._heap = heap
        self._heap_is_due = False
        self._events: deque[Event] = deque()
        self._working = False
        self._outgoing: dict[str, list[Command]] = {}
        self._to_score: list[str] = []
        self._external: dict[str, None] = {}
        self._stop = threading.Event()
        self._evaluations = EvaluationTurns(
            every=settings.evaluate_every, steps=settings.steps, backlog=settings.evaluation_backlog
        )
        self._saving: set[int] = set()
        self._version = -1
        """The newest one in the parameter server."""
        self._trained = -1
        """The trainer's: at most one ahead of it."""
        self._saved = -1
        self._idle_since = clock.now()
        self._cycled_at = -math.inf

    def request_stop(self) -> None:
        """Finish the step in training, save and end. Safe to call from another thread."""
        self._stop.set()

    def run(self) -> str:
        """Run to the end; returns the finish reason. Raises RunFailed when a part is gone for good."""
        try:
            self._perform(self._control.note(self._opening))
            self._ledger.flush()
            self._observer.phase("starting")
            self._backend.start()
            self._wait_for_start()
            self._observer.phase("running")
            while self._control.view.finished is None:
                self._turn(self._settings.interval_s)
            self._wind_down()
            return self._control.view.finished
        finally:
            try:
                self._ledger.close()
                self._journal.close()
            finally:  # a full disk must not leave processes behind
                self._backend.close()

    # ------------------------------------------------------------------ turns

    def _turn(self, timeout_s: float) -> None:
        for message in self._backend.poll(min(timeout_s, self._until_cycle())):
            self._receive(message)
        if self._stop.is_set() and not self._control.view.stopping:
            self._observer.phase("finishing step")
            self._tell(StopRequested())
        self._ask_environments()
        now = self._clock.now()
        if self._control.view.urgent or now - self._cycled_at >= self._settings.least_gap_s:
            self._cycled_at = now
            began = self._clock.cpu()
            actions = self._control.cycle(now)
            self._observer.coordinated(self._clock.cpu() - began, in_cycle=True)
            self._perform(actions)
        self._send_off()
        if self._heap_is_due and self._heap is not None:
            self._heap.settle()
        self._heap_is_due = False
        self._observer.tick(self._control, self._server.balance)
        self._journal.flush_if_due()

    def _until_cycle(self) -> float:
        """Seconds that a poll may wait."""
        if self._control.view.urgent:
            return 0.0
        gap = self._settings.least_gap_s
        return max(0.0, self._cycled_at + gap - self._clock.now()) if gap else math.inf

    def _wait_for_start(self) -> None:
        deadline = self._clock.now() + self._settings.start_timeout_s
        while self._version < 0 or not self._control.view.instances():
            if self._control.view.finished is not None:
                return  # stopped before anything was up
            if self._clock.now() > deadline:
                missing = "the trainer" if self._version < 0 else "every rollout instance"
                raise RunFailed(
                    f"{missing} did not start within cluster.start_timeout_s = "
                    f"{self._settings.start_timeout_s:g} s; see the logs folder of the run"
                )
            self._turn(self._settings.interval_s)

    def _wind_down(self) -> None:
        """After Finish: last evaluation, last checkpoint, then nothing is under way."""
        if self._trained >= 0:
            if self._saved < self._trained:
                self._observer.phase("saving")
                self._save(self._trained)
            while self._version < self._trained:  # the last push, which evaluation needs, and which may fail
                self._wait()
            stopped = self._control.view.finished == "interrupted"
            if (
                self._settings.evaluate_every
                and not stopped
                and self._observer.last_evaluated < self._version
            ):
                self._evaluate(self._version)
        while self._saving or (self._evaluations.are_left and not self._stop.is_set()):
            if not self._saving:
                self._observer.phase("evaluating")
            self._wait()
        self._observer.finish(self._control, self._server.balance)

    def _wait(self) -> None:
        """A turn in which nothing is decided any more."""
        for message in self._backend.poll(self._settings.interval_s):
            self._receive(message)
        self._observer.tick(self._control, self._server.balance)

    # ------------------------------------------------------------------ messages

    def _receive(self, message: Message) -> None:
        match message:
            case InstanceUpdated(update=update):
                late = [
                    Late(d.trajectory_id, len(d.segment.tokens), d.finish_reason is not None)
                    for d in self._server.absorb(update.deltas)
                ]
                report = update.report
                self._observer.reported(report, late)
                self._journal_report(report)
                self._tell(Reported(report=report))
            case Scored(rewards=rewards):
                self._observer.scored([reward for _, reward in rewards])
                for trajectory_id, reward in rewards:
                    if trajectory_id in self._server:
                        self._journal.scored(trajectory_id, reward.raw, reward.status, reward.seconds)
                        self._server.set_reward(trajectory_id, reward)
                        self._rewarded(trajectory_id, reward.raw, reward.usable)
            case StepTrained():
                self._on_trained(message)
            case WeightsPushed():
                self._observer.pushed(message.version, message.seconds)
                if self._evaluations.is_due(message.version):
                    self._evaluate(message.version)
                self._on_pushed(message.version, message.seconds)
            case TrainerUp(version=version, push_s=push_s):
                self._observer.pushed(version, push_s)
                self._trained, self._idle_since = version, self._clock.now()
                self._on_pushed(version, push_s)
                if self._settings.evaluate_every and version < self._settings.steps:
                    self._evaluate(version)
            case InstanceJoined():
                self._observer.instance_up(message.instance)
                self._journal.joined(message)
                self._tell(message)
            case InstanceDown():
                self._on_instance_down(message)
            case CheckpointSaved(version=version, seconds=seconds):
                self._saving.discard(version)
                self._saved = version
                self._observer.event("checkpoint", f"saved step {version} in {seconds:.1f} s")
                self._journal.saved(version, seconds)
            case Evaluated():
                self._evaluations.done(message.version)
                self._observer.evaluated(message)
                self._journal.evaluated(message.version, message.seconds)
                self._start_evaluation()
            case EvaluationFailed(version=version, reason=reason):
                self._evaluations.done(version)
                self._observer.event("evaluation_failed", f"version {version} is not evaluated: {reason}")
                self._start_evaluation()
            case PartFailed(part=part, reason=reason, blame_user=blame_user):
                raise UserError(reason) if blame_user else RunFailed(f"{part} failed: {reason}")

    def _on_trained(self, message: StepTrained) -> None:
        result = message.result
        trained = tuple(
            TrainedMember(
                id=t.trajectory_id, min=t.min_version, max=t.max_version, tokens=t.tokens, hash=t.token_hash
            )
            for t in result.trained
        )
        self._tell(
            TrainedStep(
                record=Trained(step=result.version_start, version=result.version_start, trajectories=trained)
            )
        )
        self._ledger.flush()
        self._server.trained(result.version_start)
        self._observer.trained(message, self._control, self._server.balance)
        self._journal.trained(result.version_start, message.update_s, message.push_s)
        every = self._settings.checkpoint_every
        if every and result.version % every == 0:
            self._save(result.version)
        self._trained, self._idle_since = result.version, self._clock.now()
        self._tell(TrainerFree(version=result.version))

    def _on_pushed(self, version: int, seconds: float) -> None:
        self._version = version
        self._journal.pushed(version, seconds)
        self._tell(Pushed(version=version))

    def _on_instance_down(self, message: InstanceDown) -> None:
        self._observer.instance_down(message.instance, message.reason)
        if self._control.view.is_current(message.instance, message.incarnation):
            resident = self._control.view.resident(message.instance)
            self._outgoing.pop(message.instance, None)
            lost = InstanceLost(
                instance=message.instance,
                incarnation=message.incarnation,
                lengths=self._server.lengths(resident),
                reason=message.reason,
            )
            self._journal.lost(lost)
            self._tell(lost)

    def _journal_report(self, report: InstanceReport) -> None:
        if self._journal.is_on:
            left = [t.trajectory_id for t in (*report.interrupted, *report.finished)]
            runs = {t: self._server.get(t).version_runs for t in left if t in self._server}
            self._journal.reported(report, runs)

    # ------------------------------------------------------------------ actions

    def _tell(self, event: Event) -> None:
        """Queue an event; unless actions are being performed, work the queue off."""
        self._events.append(event)
        if not self._working:
            self._perform([])

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, then the events that come up, one after the other.

        An event that comes up while actions are performed waits for the rest of them, so that ledger records
        are written in the order of their numbers.
        """
        self._working = True
        try:
            self._apply(actions)
            while self._events:
                began = self._clock.cpu()
                actions = self._control.handle(self._events.popleft())
                self._observer.coordinated(self._clock.cpu() - began, in_cycle=False)
                self._apply(actions)
        finally:
            self._working = False

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append(record=record, seq=seq, attempt=attempt):
                    self._ledger.append(record, seq, attempt)
                    self._journal.ledger(seq)
                case Send(command=command):
                    self._observer.command(command)
                    self._journal.command(command)
                    self._outgoing.setdefault(command.instance, []).append(command)
                case Score(trajectory_id=trajectory_id):
                    self._after_turn_end(trajectory_id)
                case DrawGroups(count=count, padding=padding):
                    self._draw(count, padding)
                case Discard(trajectory_ids=ids, reason=reason):
                    self._observer.discarded(reason, self._server.discard(ids, reason))
                    self._journal.released(ids, reason)
                case GiveUp(trajectory_id=trajectory_id, reason=reason):
                    self._server.give_up(trajectory_id)
                    self._journal.gave_up(trajectory_id, reason)
                    self._observer.event("gave_up", f"trajectory {trajectory_id} is masked: {reason}")
                case Resample(trajectory_id=trajectory_id, new_id=new_id, reason=reason):
                    self._observer.resampled(self._server.resample(trajectory_id, new_id), reason)
                    self._journal.resampled(trajectory_id, new_id, reason)
                case Truncate(trajectory_id=trajectory_id, reason=reason):
                    self._observer.truncated(self._server.truncate(trajectory_id), reason)
                    self._journal.truncated(trajectory_id, reason)
                case Train():
                    self._train(action)
                case Finish(reason=reason):
                    self._ledger.flush(sync=True)
                    self._observer.event("finish", reason)
                    self._journal.finished(reason)

    def _after_turn_end(self, trajectory_id: str) -> None:
        trajectory = self._server.get(trajectory_id)
        waited = trajectory_id in self._external
        stopped = trajectory.finish_reason is FinishReason.STOP
        answer = self._environment.respond(trajectory) if stopped else Done()
        if isinstance(answer, Waiting):
            if not waited:
                self._external[trajectory_id] = None
                self._journal.external(trajectory_id, answer.limit_s)
                self._tell(WaitingExternal(trajectory_id=trajectory_id, limit_s=answer.limit_s))
            return
        self._external.pop(trajectory_id, None)
        if trajectory.finish_reason is FinishReason.FAILED:
            self._observer.sampled(trajectory)
            self._server.set_reward(trajectory_id, FAILED)
            self._journal.scored(trajectory_id, FAILED.raw, FAILED.status)
            self._rewarded(trajectory_id, FAILED.raw, FAILED.usable)
            return
        trajectory = self._server.answer(trajectory_id, answer)
        if trajectory.finish_reason is None:
            self._journal.given(trajectory_id, trajectory.length)
            self._tell(TurnGiven(trajectory_id=trajectory_id, length=trajectory.length))
            return
        if waited:
            self._tell(Ended(trajectory_id=trajectory_id))
        self._observer.sampled(trajectory)
        self._to_score.append(trajectory_id)

    def _ask_environments(self) -> None:
        """Ask again for trajectories whose environment was not ready."""
        for trajectory_id in list(self._external):
            if trajectory_id in self._server:
                self._after_turn_end(trajectory_id)
            else:
                del self._external[trajectory_id]

    def _rewarded(self, trajectory_id: str, raw: float, usable: bool) -> None:
        hashed = token_hash(self._server.get(trajectory_id).tokens)
        self._tell(Rewarded(trajectory_id=trajectory_id, raw=raw, usable=usable, token_hash=hashed))

    def _draw(self, count: int, padding: bool) -> None:
        groups, exhausted = self._server.draw(count, padding=padding)
        self._journal.drawn(groups)
        self._tell(GroupsDrawn(groups=groups))
        if exhausted:
            self._tell(SourceExhausted())

    def _train(self, action: Train) -> None:
        self._ledger.flush()
        batch = self._server.batch(action.step, action.groups, action.final)
        waited_s = self._clock.now() - self._idle_since
        self._observer.batch(batch.step, batch.groups, waited_s)
        self._journal.batch(action.step, waited_s)
        self._backend.train(batch, hold=self._evaluations.is_due(action.step + 1))
        self._heap_is_due = True

    def _send_off(self) -> None:
        """Hand over what this turn decided: one message per instance, one for the rewards."""
        for instance, commands in self._outgoing.items():
            payloads = {
                c.trajectory_id: self._server.get(c.trajectory_id)
                for c in commands
                if isinstance(c, Route) and c.trajectory_id in self._server
            }
            self._backend.deliver(instance, commands, payloads)
        self._outgoing = {}
        ids, self._to_score = self._to_score, []
        trajectories = [self._server.get(t) for t in ids if t in self._server]
        if trajectories:
            self._backend.score(trajectories)

    # ------------------------------------------------------------------ evaluation and checkpoints

    def _evaluate(self, version: int) -> None:
        skipped = self._evaluations.ask(version)
        if skipped is not None:
            self._backend.release(skipped)
            text = f"version {skipped} is not evaluated: evaluation is behind (see evaluation.backlog)"
            self._observer.event("evaluation_skipped", text)
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
