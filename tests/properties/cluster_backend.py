"""The backend of a random cluster: every part works at its own pace, fails and dies, all by one seed.

::

    RunLoop ──deliver──> channel ──> RolloutInstance ──report──> channel ──> RunLoop
       └──train──> trainer (slow) ──push──> parameter server       (each channel keeps its order)

The loop looks at messages late, so that several come at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from cluster_channels import Channels
from cluster_instances import Instances
from cluster_settings import ClusterSettings
from cluster_watch import Violation, Watch
from kept_ledger import KeptLedger

from staleflow.coordination.actions import Command
from staleflow.data.environment import Answer, Done, Failed, Given, Waiting
from staleflow.data.trajectory import Reward, TrainBatch, Trajectory, token_hash
from staleflow.protocol.records import Trained, TrainedMember
from staleflow.rollout.scripted_lengths import Lengths
from staleflow.runtime.backend import EnvironmentsAnswered, Message, RewardsReady, TrainerUp
from staleflow.simulation.event_queue import EventQueue
from staleflow.telemetry.events import (
    CheckpointSaved,
    Evaluated,
    EvaluationFailed,
    StepTrained,
    WeightsPushed,
)

LONGEST_RUN_S = 2000.0
"""A run that takes longer hangs: even a source of 14 prompts on one slow instance takes a tenth of this."""
EVALUATION_FAILURES = 0.2


class RandomBackend:
    """See the module. Every order is checked: no part is asked for the same thing twice."""

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        watch: Watch,
        clock: EventQueue,
        ledger: KeptLedger,
        lengths: Lengths | None,
    ) -> None:
        self.clock = clock
        self.held: set[int] = {0} if settings.evaluate_every else set()
        """Versions kept for their evaluation."""
        self.saved: list[int] = []
        self._settings = settings
        self._ledger = ledger
        self._rng = rng = random.Random(f"run-{settings.seed}")
        self._messages: list[Message] = []
        self._tell = self._messages.append
        self._channels = Channels(clock, rng, settings.delay)
        self.instances = Instances(
            settings,
            clock=clock,
            rng=rng,
            channels=self._channels,
            watch=watch,
            tell=self._tell,
            lengths=lengths,
        )
        self._scored: set[str] = set()
        self._asked: set[str] = set()
        self._answers_at: dict[tuple[str, int], float] = {}
        """When the environment of a trajectory's turn has its answer; inf: never."""
        self._is_training = False
        self._evaluating: int | None = None
        self._pushed_at = self._saved_at = 0.0

    def _fail(self, message: str) -> None:
        raise Violation(f"seed {self._settings.seed}, at {self.clock.time:.3f} s: {message}")

    def _after(self, seconds: float, happen: object, *arguments: object) -> None:
        self.clock.schedule(self.clock.time + seconds, happen, *arguments)  # type: ignore[arg-type]

    def start(self) -> None:
        """The trainer and every instance."""
        self.instances.newest = 0
        self._channels.send("trainer", 0.0, self._tell, TrainerUp(version=0, push_s=0.0))
        self.instances.start()

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Through a channel."""
        self.instances.send(instance, commands, payloads)

    # ------------------------------------------------------------------ environments and rewards

    def respond(self, trajectories: Sequence[Trajectory]) -> None:
        """Each environment takes its time."""
        for trajectory in trajectories:
            if trajectory.trajectory_id in self._asked:
                self._fail(f"the environment of {trajectory.trajectory_id} is asked twice")
            self._asked.add(trajectory.trajectory_id)
            self._after(self._rng.random() * self._settings.delay, self._answer, trajectory)

    def _answer(self, trajectory: Trajectory) -> None:
        self._asked.remove(trajectory.trajectory_id)
        answer = self._answer_to(trajectory)
        self._tell(EnvironmentsAnswered(answers=((trajectory.trajectory_id, answer),)))

    def _answer_to(self, trajectory: Trajectory) -> Answer:
        settings, turn = self._settings, sum(not segment.generated for segment in trajectory.segments)
        if self._rng.random() < settings.tool_failures:
            return Failed(reason="the tool is broken")
        if turn + 1 >= settings.turns:
            return Done()
        key = trajectory.trajectory_id, turn
        if key not in self._answers_at:
            is_mute = self._rng.random() < settings.tool_failures
            self._answers_at[key] = math.inf if is_mute else self.clock.time + settings.slow_tool
        if self.clock.time < self._answers_at[key]:
            return Waiting(limit_s=4 * settings.slow_tool or 1.0)
        return Given(tokens=(2, 3))

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Each verifier takes its time."""
        for trajectory in trajectories:
            if trajectory.trajectory_id in self._scored:
                self._fail(f"{trajectory.trajectory_id} is scored twice")
            self._scored.add(trajectory.trajectory_id)
            self._after(self._rng.random() * self._settings.score_s, self._score, trajectory.trajectory_id)

    def _score(self, trajectory_id: str) -> None:
        is_equal = self._rng.random() < self._settings.equal_rewards
        reward = Reward(raw=1.0 if is_equal else self._rng.random())
        self._tell(RewardsReady(((trajectory_id, reward),)))

    # ------------------------------------------------------------------ trainer

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """The passes overlap with the push before; the update waits for it."""
        if self._is_training:
            self._fail(f"step {batch.step} is handed over while another one is trained")
        self._is_training = True
        seconds = self._settings.train_s * self._rng.uniform(0.5, 1.5)
        ends = max(self.clock.time + seconds, self._pushed_at)
        waited_s = ends - self.clock.time - seconds
        self.clock.schedule(ends, self._trained, batch, hold, seconds, waited_s)

    def _trained(self, batch: TrainBatch, hold: bool, update_s: float, waited_s: float) -> None:
        self._is_training = False
        now, members = self.clock.time, []
        for one in (scored.trajectory for group in batch.groups for scored in group):
            oldest, newest = one.min_version, one.max_version
            if oldest is None or newest is None:  # masked before its first token
                oldest = newest = batch.step
            tokens = int(one.loss_mask.sum())
            members.append(TrainedMember(one.trajectory_id, oldest, newest, tokens, token_hash(one.tokens)))
        message = StepTrained(
            step=batch.step, trained=tuple(members), metrics={}, update_s=update_s, waited_s=waited_s
        )
        self._channels.send("trainer", now, self._tell, message)
        push_s = self._settings.push_s * self._rng.uniform(0.5, 1.5)
        self._pushed_at = now + push_s
        self._after(push_s, self._pushed, batch.step + 1, hold, push_s)

    def _pushed(self, version: int, hold: bool, push_s: float) -> None:
        """Instances can pull it from now on; the loop learns of it a little later."""
        self.instances.newest = version
        if hold:
            self.held.add(version)
        message = WeightsPushed(version=version, seconds=push_s)
        self._channels.send("trainer", self.clock.time, self._tell, message)

    # ------------------------------------------------------------------ checkpoints and evaluations

    def save(self, version: int) -> None:
        """The records of what it was trained on must be on the disk."""
        on_disk = {r.step for r in self._ledger.synced if isinstance(r, Trained)}
        if version > 0 and version - 1 not in on_disk:
            self._fail(f"version {version} is saved before the record of its step")
        began = max(self.clock.time, self._saved_at)  # one after the other
        self._saved_at = began + self._rng.random() * self._settings.save_s
        self.clock.schedule(self._saved_at, self._save, version)

    def _save(self, version: int) -> None:
        self.saved.append(version)
        self._tell(CheckpointSaved(version=version, seconds=0.0))

    def evaluate(self, version: int) -> None:
        """One at a time, of a version that is still there."""
        if self._evaluating is not None:
            self._fail(f"{version} is to be evaluated while {self._evaluating} is")
        if version not in self.held and version != self.instances.newest:
            self._fail(f"version {version} is to be evaluated, and is gone")
        self._evaluating = version
        self._after(self._rng.random() * self._settings.evaluation_s, self._evaluate, version)

    def _evaluate(self, version: int) -> None:
        self._evaluating = None
        self.held.discard(version)
        if self._rng.random() < EVALUATION_FAILURES:
            self._tell(EvaluationFailed(version=version, reason="by chance"))
        else:
            self._tell(Evaluated(version=version))

    def release(self, version: int) -> None:
        """It must be held."""
        self.held.remove(version)

    # ------------------------------------------------------------------ messages

    @property
    def more_now(self) -> bool:
        """A poll takes in all there is."""
        return False

    def poll(self, until: float) -> Sequence[Message]:
        """From the first message on, everything that comes within `cycle_delay`."""
        messages, clock = self._messages, self.clock
        clock.advance(until, messages)
        if not messages and until == math.inf:
            self._fail("nothing is under way any more, and the loop waits for ever")
        if messages:
            clock.advance(clock.time + self._rng.random() * self._settings.cycle_delay, ())
        if clock.time > LONGEST_RUN_S:
            self._fail("no end")
        taken = messages[:]
        messages.clear()
        return taken

    def close(self) -> None:
        """End every engine."""
        self.instances.close()
