"""The event loop of a simulated cluster: what `runtime.loop` is to machines, this is to a virtual clock.

::

    heap of (time, what) ──next──> instances, trainer, rewards ──events──> Control ──actions──> the same
                                                                  ^
    a cycle follows news that may change a decision, at the earliest interval_s after the last one

Invariants: time never goes back; events of one moment come before its cycle, in the order in which they were
foreseen; nothing but the settings, the control and their seeds enters, so the same settings give the same
ledger, byte for byte; only living trajectories are in memory.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from staleflow.coordination.actions import (
    Action,
    Append,
    Command,
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
from staleflow.coordination.control import Control
from staleflow.coordination.events import (
    Event,
    GroupsDrawn,
    Pushed,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
)
from staleflow.errors import RunFailed
from staleflow.protocol.records import Record, Start, Trained, TrainedMember
from staleflow.simulation.event_queue import Agenda
from staleflow.simulation.fleet import SimulatedFleet
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.settings import ClusterSettings
from staleflow.simulation.stats import Measures
from staleflow.simulation.store import TrajectoryStore
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.simulation.watch import Watch

AppendRecord = Callable[[Record, int, int], None]
"""(record, sequence number, attempt): `LedgerWriter.append` is one."""

CYCLES_ALONE = 1000
"""So many cycles in a row with nothing under way are a standstill, whatever the coordinator waits for."""


class SimulatedCluster:
    """One run, from start to Finish. `run` may be called once."""

    def __init__(
        self,
        *,
        control: Control,
        settings: ClusterSettings,
        opening: Start,
        append: AppendRecord | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`opening` is the ledger's first record; `append` gets all of them, in order."""
        self._control = control
        self._settings = settings
        self._opening = opening
        self._append = append
        self._watch = watch or Watch()
        self._stop = False
        self._halted = False
        self._agenda = Agenda()
        self._events: deque[Event] = deque()
        self._working = False
        self._cycle_at = math.inf
        self._alone = 0
        self._last_cycle = -settings.interval_s
        self._given_up: set[str] = set()
        self._idle_since = 0.0
        workers = settings.reward_workers
        self._rewards_free = None if workers is None else [0.0] * workers
        self._measures = Measures()
        self._store = TrajectoryStore(settings, self._measures.tokens)
        self._fleet = SimulatedFleet(
            settings=settings,
            agenda=self._agenda,
            store=self._store,
            measures=self._measures,
            watch=self._watch,
            tell=self._tell,
        )

    # ------------------------------------------------------------------ the loop

    def run(self, *, max_seconds: float | None = None) -> SimulationResult:
        """Run to the end, or to `max_seconds` of simulated time. Raises RunFailed when nothing can go on."""
        self._watch.begin(self)
        self._perform(self._control.note(self._opening))
        self._push(0)
        self._fleet.start()
        limit = math.inf if max_seconds is None else max_seconds
        while self._control.view.finished is None and self._turn(limit):
            pass
        return self._result(self._control.view.finished or "time")

    @property
    def now(self) -> float:
        """Simulated seconds from the start."""
        return self._agenda.now

    def request_stop(self) -> None:
        """Finish the step in training, and end. Safe to call from another thread."""
        self._stop = True

    def halt(self) -> None:
        """Go no further than this moment, in the middle of it all: the result's reason is `time`."""
        self._halted = True
        self._agenda.until = -math.inf

    def find(self, trajectory_id: str) -> SimulatedTrajectory | None:
        """A living trajectory that is still wanted."""
        return self._store.find(trajectory_id)

    def balance(self) -> dict[str, int]:
        """Generated tokens, as far as decoding has come, by what became of them; what an instance took with
        it when it was lost was never known to be generated.
        """
        tokens = self._measures.tokens
        generated = self._measures.generated + self._fleet.generated()
        values = {
            "generated": generated - tokens["lost"],
            "trained": tokens["trained"],
            "filtered": tokens["filtered"],
            "aborted": tokens["aborted"],
            "discarded": tokens["failed"] + tokens["expired"] + tokens["discarded"],
        }
        values["in_flight"] = 2 * values["generated"] - sum(values.values())
        return values

    def _turn(self, limit: float) -> bool:
        """What comes before the next cycle, and the cycle. False: the run is over, or at `limit`."""
        agenda = self._agenda
        agenda.until = min(self._cycle_at, limit)
        agenda.go_on()
        if self._halted or self._control.view.finished is not None:
            return False
        self._alone = 0 if len(agenda) else self._alone + 1
        if self._alone > CYCLES_ALONE or (not len(agenda) and self._cycle_at == math.inf):
            raise RunFailed(
                f"the simulation is stuck after {self.now:g} s in step {self._control.view.next_buffer}: "
                f"nothing is under way, and the coordinator orders nothing"
            )
        agenda.now = min(self._cycle_at, limit)
        if self._cycle_at > limit:
            return False
        self._cycle()
        return True

    def _cycle(self) -> None:
        self._last_cycle = self.now
        self._measures.cycles += 1
        self._cycle_at = math.inf
        if self._stop and not self._control.view.stopping:
            self._perform(self._control.handle(StopRequested()))
        self._perform(self._control.cycle(self.now))
        wake_at = self._control.view.wake_at
        if wake_at is not None:
            self._want_cycle(wake_at)
        self._watch.cycled()

    def _want_cycle(self, at: float) -> None:
        at = max(at, self._last_cycle + self._settings.interval_s)
        if at < self._cycle_at:
            self._cycle_at = at
            if at < self._agenda.until:
                self._agenda.until = at

    # ------------------------------------------------------------------ control

    def _tell(self, event: Event) -> None:
        """Tell an event; one that comes up while actions are performed waits for the rest of them."""
        if self._working:
            self._events.append(event)
            return
        actions = self._control.handle(event)
        if actions:
            self._perform(actions)
        elif isinstance(event, Rewarded):
            return  # its group is not complete: there is nothing new to decide on
        self._want_cycle(self._agenda.now)

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, then the events that come up, one after the other."""
        if actions:
            self._working = True
            self._apply(actions)
            while self._events:
                self._apply(self._control.handle(self._events.popleft()))
                self._want_cycle(self._agenda.now)
            self._working = False
        self._fleet.replan()

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Append(record=record, seq=seq, attempt=attempt):
                    if self._append is not None:
                        self._append(record, seq, attempt)
                case Send(command=command):
                    self._send(command)
                case Score(trajectory_id=trajectory_id):
                    self._score(trajectory_id)
                case DrawGroups(count=count, padding=padding):
                    self._draw(count, padding)
                case Discard(trajectory_ids=ids, reason=reason):
                    self._watch.discarded(ids, reason)
                    self._store.discard(ids, reason)
                    if self._given_up:
                        self._given_up.difference_update(ids)
                case Resample(trajectory_id=trajectory_id, new_id=new_id, reason=reason):
                    self._measures.resampled += 1
                    self._watch.resampled(trajectory_id, new_id, reason)
                    self._store.resample(trajectory_id, new_id)
                case Truncate(trajectory_id=trajectory_id, reason=reason):
                    self._measures.truncated += 1
                    self._store.truncate(trajectory_id)
                    self._watch.truncated(trajectory_id, reason)
                case GiveUp(trajectory_id=trajectory_id, reason=reason):
                    self._given_up.add(trajectory_id)
                    self._watch.gave_up(trajectory_id, reason)
                case Train():
                    self._train(action)
                case Finish(reason=reason):
                    self._agenda.until = -math.inf
                    self._watch.finished(reason)

    def _send(self, command: Command) -> None:
        self._measures.commands[type(command)] += 1
        self._watch.command(command)
        self._fleet.send(command)

    def _draw(self, count: int, padding: bool) -> None:
        groups, exhausted = self._store.draw(count, padding=padding)
        self._watch.drawn(groups)
        self._tell(GroupsDrawn(groups=groups))
        if exhausted:
            self._tell(SourceExhausted())

    # ------------------------------------------------------------------ reward and training

    def _score(self, trajectory_id: str) -> None:
        self._watch.scoring(trajectory_id)
        begins = self.now
        if self._rewards_free is not None:
            begins = max(begins, heapq.heappop(self._rewards_free))
        done = begins + self._settings.reward_s
        if self._rewards_free is not None:
            heapq.heappush(self._rewards_free, done)
        if done <= self.now:
            self._rewarded(trajectory_id)
        else:
            self._agenda.foresee(done, self._rewarded, trajectory_id)

    def _rewarded(self, trajectory_id: str) -> None:
        trajectory = self._store.find(trajectory_id)
        if trajectory is not None:
            raw, usable = self._settings.reward(trajectory_id), trajectory_id not in self._given_up
            self._watch.scored(trajectory_id, raw, usable, self._settings.reward_s)
            self._tell(Rewarded(trajectory_id, raw, usable, trajectory.hashed()))

    def _train(self, action: Train) -> None:
        costs = self._settings.trainer
        members = self._store.take(m for _, group in action.groups for m in group)
        update_s = costs.fixed_s + costs.token_s * sum(t.base for t in members)
        self._measures.begin_step(action.step, members, began=self.now, idle_since=self._idle_since)
        self._watch.batch(action, members, self.now - self._idle_since)
        trained = tuple(
            [
                TrainedMember(
                    t.trajectory_id,
                    _or(t.min_version, action.step),
                    _or(t.max_version, action.step),
                    t.response,
                    t.token_hash,
                )
                for t in members
            ]
        )
        record = Trained(step=action.step, version=action.step, trajectories=trained)
        self._agenda.foresee(self.now + (update_s + costs.push_s), self._trained, record, update_s)

    def _trained(self, record: Trained, update_s: float) -> None:
        self._idle_since = self.now
        self._measures.end_step(ended=self.now)
        self._given_up.difference_update(t.id for t in record.trajectories)
        self._fleet.version = record.step + 1
        self._tell(TrainedStep(record=record))
        self._watch.trained(record, update_s, self._settings.trainer.push_s)
        self._push(record.step + 1)

    def _push(self, version: int) -> None:
        self._watch.pushed(version)
        self._tell(Pushed(version=version))

    # ------------------------------------------------------------------ the end

    def _result(self, reason: str) -> SimulationResult:
        self._fleet.stop()
        self._measures.tokens["in_flight"] += sum(t.response for t in self._store.living())
        self._watch.ended()
        return self._measures.result(reason, self.now)


def _or(version: int | None, default: int) -> int:
    return default if version is None else version
