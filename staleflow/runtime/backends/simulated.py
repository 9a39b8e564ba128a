"""The simulated backend: models of instances, verifiers and trainer on a virtual clock.

Invariants: time passes by what happens only, so the same settings and seeds give the same ledger, byte for
byte; messages of one moment come one after the other, in the order in which they were scheduled; only living
trajectories are in memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from staleflow.coordination.actions import Command
from staleflow.data.trajectory import Reward
from staleflow.errors import RunFailed
from staleflow.protocol.records import TrainedMember
from staleflow.runtime.backend import Message, RewardsReady, TimeUp, TrainerUp
from staleflow.simulation.event_queue import EventQueue
from staleflow.simulation.fleet import SimulatedFleet
from staleflow.simulation.settings import ClusterSettings
from staleflow.simulation.stats import SimulationStats
from staleflow.simulation.store import SimulatedBatch, SimulatedStore
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.telemetry.events import Handlers, RunEnded, StepTrained, WeightsPushed

POLLS_ALONE = 1000
"""So many polls in a row with nothing under way are a standstill, whatever the coordinator waits for."""


class SimulatedBackend:
    """See the module. A listener too, so that every token is accounted for when the run ends."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.clock = EventQueue()
        self.stats = SimulationStats(self.clock.now)
        self._settings = settings
        self._messages: list[Message] = []
        self._polls_alone = 0
        self._pushed_at = 0.0
        """When the last push that has begun is over."""
        self._rewards: dict[float, Reward] = {}
        """One value for each raw reward: most runs have two."""
        workers = settings.reward_workers
        self._rewards_free = None if workers is None else [0.0] * workers
        self.store = SimulatedStore(settings, self.stats.tokens, self._generated)
        self._fleet = SimulatedFleet(
            settings=settings,
            queue=self.clock,
            store=self.store,
            stats=self.stats,
            tell=self._messages.append,
        )

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {RunEnded: lambda _: self._stop()}

    def end_at(self, seconds: float) -> None:
        """End the run at this simulated time, whatever is under way. Call it before `start`."""
        self.clock.schedule(seconds, self._messages.append, TimeUp())

    # ------------------------------------------------------------------ orders

    def start(self) -> None:
        """All parts are up at once."""
        self._messages.append(TrainerUp(version=0, push_s=0.0))
        self._fleet.start()

    def deliver(
        self, instance: str, commands: Sequence[Command], payloads: Mapping[str, SimulatedTrajectory]
    ) -> None:
        """Commands are on their way for `command_s`."""
        for command in commands:
            self._fleet.send(command)
        self._fleet.replan()

    def respond(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """No environment is simulated: `LoopSettings.multi_turn` is False."""
        raise NotImplementedError

    def score(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """Each takes `reward_s` of one of the workers."""
        now, free = self.clock.time, self._rewards_free
        for trajectory in trajectories:
            begins = now if free is None else max(now, heapq.heappop(free))
            done = begins + self._settings.reward_s
            if free is not None:
                heapq.heappush(free, done)
            if done <= now:
                self._rewarded(trajectory.trajectory_id)
            else:
                self.clock.schedule(done, self._rewarded, trajectory.trajectory_id)

    def _rewarded(self, trajectory_id: str) -> None:
        raw = self._settings.reward(trajectory_id)
        reward = self._rewards.get(raw)
        if reward is None:
            reward = self._rewards[raw] = Reward(raw=raw, seconds=self._settings.reward_s)
        self._messages.append(RewardsReady(((trajectory_id, reward),)))

    def train(self, batch: SimulatedBatch, *, hold: bool) -> None:
        """A step. Its end, where the weights change, waits for the push of those that it started from."""
        costs, step = self._settings.trainer, batch.step
        members = [s.trajectory for group in batch.groups for s in group]
        update_s = costs.fixed_s + costs.token_s * sum([t.base for t in members])
        trained = tuple(
            [
                TrainedMember(
                    t.trajectory_id,
                    step if t.min_version is None else t.min_version,
                    step if t.max_version is None else t.max_version,
                    t.response,
                    t.token_hash,
                )
                for t in members
            ]
        )
        ends = max(self.clock.time + update_s, self._pushed_at)
        message = StepTrained(
            step=step,
            trained=trained,
            metrics={},
            update_s=update_s,
            waited_s=ends - (self.clock.time + update_s),
        )
        self.clock.schedule(ends, self._trained, message)

    def _trained(self, message: StepTrained) -> None:
        self._messages.append(message)
        self._pushed_at = self.clock.time + self._settings.trainer.push_s
        self.clock.schedule(self._pushed_at, self._pushed, message.step + 1)

    def _pushed(self, version: int) -> None:
        self._fleet.version = version
        self._messages.append(WeightsPushed(version=version, seconds=self._settings.trainer.push_s))

    def save(self, version: int) -> None:
        """Nothing is saved: `LoopSettings.checkpoint_every` is None."""
        raise NotImplementedError

    def evaluate(self, version: int) -> None:
        """Nothing is evaluated: `LoopSettings.evaluate_every` is 0."""
        raise NotImplementedError

    def release(self, version: int) -> None:
        """Nothing is held."""

    # ------------------------------------------------------------------ messages

    @property
    def more_now(self) -> bool:
        """See `Backend`."""
        return bool(self._messages) or self.clock.is_due

    def poll(self, until: float) -> Sequence[Message]:
        """The messages of what happens next; none when nothing does by `until`."""
        messages, queue = self._messages, self.clock
        queue.advance(until, messages)
        if not messages:
            self._polls_alone = 0 if len(queue) else self._polls_alone + 1
            if self._polls_alone > POLLS_ALONE or (until == math.inf and not len(queue)):
                raise RunFailed(
                    f"the simulation is stuck after {queue.time:g} s at weights of version "
                    f"{self._fleet.version}: nothing is under way, and the coordinator orders nothing"
                )
            return ()
        taken = messages[:]
        del messages[:]
        return taken

    def close(self) -> None:
        """Instances hold nothing any more."""
        self._stop()

    def _stop(self) -> None:
        self._fleet.stop()
        self.store.close()

    def _generated(self) -> int:
        return self.stats.generated + self._fleet.generated()
