"""A random cluster: the run loop over a backend whose parts take random times, die and forget, by one seed.

::

    RunLoop ──deliver──> channel ──> RolloutInstance ──report──> channel ──> RunLoop      (each channel keeps
       └─────train─────> trainer (slow) ──StepTrained, WeightsPushed──> channel ──┘        its order)

`Control` with a policy, rollout instances (with fake engines that share the scheduler of the real ones) and
the trajectory server are those of real runs. Instances die and start anew, pulls are refused, trajectories
are forgotten, verifiers and environments are late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster_instances import Instances, Node
from cluster_settings import ClusterSettings
from cluster_watch import Violation
from watched_coordinator import WatchedCoordinator

from staleflow.coordination.actions import Command
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.events import InstanceJoined, InstanceLost
from staleflow.data.environment import Answer, Done, Given, Waiting
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.trajectory import Prompt, Reward, TrainBatch, Trajectory, token_hash
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Consume, Record, Start, TrainedMember, to_json
from staleflow.runtime.backend import EnvironmentsAnswered, Message, RewardsReady, TrainerUp
from staleflow.runtime.loop import RunLoop
from staleflow.runtime.loop_settings import LoopSettings
from staleflow.servers.trajectory_server import TrajectoryServer
from staleflow.telemetry.events import (
    CommandSent,
    EventStream,
    GivenUp,
    Handlers,
    InstanceDown,
    ReportReceived,
    StepTrained,
    TurnEnded,
    WeightsPushed,
)
from staleflow.training.filtering import is_uninformative

LONGEST_RUN_S = 2000.0
"""A run that takes longer hangs: even a source of 14 prompts on one slow instance takes a tenth of this."""


class RandomCluster(Instances):
    """One run: backend, ledger and listener of its loop. `run` plays it to the end."""

    def __init__(
        self,
        settings: ClusterSettings,
        tell: Callable[[str], None] | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        """`tell` gets what happens, for somebody who looks at one seed. `coordinator`: another than the
        watched one of the settings' policy.
        """
        super().__init__(settings)
        self.lines: list[str] = []
        self.records: list[Record] = []
        self.trained: list[str] = []
        self.drawn: list[str] = []
        self.given_up: set[str] = set()
        self.finish: str | None = None
        self._messages: list[Message] = []
        self._sent: list[Command] = []
        self._asked: dict[tuple[str, int], float] = {}
        self.coordinator = coordinator or WatchedCoordinator(settings, random.Random(settings.seed))
        self.control = self._make_control()
        if tell is not None:
            self._narrate(tell)
        self.server = TrajectoryServer(
            prompts=self._prompts(0, settings.prompts),
            padding=self._prompts(1, None),
            members=settings.group_size + settings.surplus,
            max_new_tokens=settings.max_new_tokens,
        )
        self.loop = self._make_loop()

    def _make_control(self) -> Control:
        settings = self.settings
        return Control(
            buffer=StalenessBuffer(
                bound=settings.kept_bound, batch_size=settings.batch_size, spare_limit=settings.spare_groups
            ),
            coordinator=self.coordinator,
            batches=BatchSettings(
                steps=settings.steps, group_size=settings.group_size, last_batch=settings.last_batch
            ),
            patience=Patience(stall_after_s=settings.stall_after_s),
            stragglers=settings.stragglers,
            expected_response=max(1, settings.max_new_tokens // 4),
            group_filter=is_uninformative if settings.is_filtered else None,
            costs=OnlineCosts(settings.known_costs or START_VALUES, refine=settings.refine_costs),
        )

    def _make_loop(self) -> RunLoop[Trajectory, TrainBatch]:
        settings = self.settings
        return RunLoop(
            control=self.control,
            store=self.server,
            backend=self,
            ledger=self,
            opening=Start(
                bound=settings.kept_bound,
                batch_size=settings.batch_size,
                group_size=settings.group_size,
                last_batch=settings.last_batch,
                spare_limit=settings.spare_groups,
            ),
            stream=EventStream([self]),
            clock=self.clock,
            settings=LoopSettings(
                steps=settings.steps,
                interval_s=settings.cycle_delay,
                idle_s=LONGEST_RUN_S,
                evaluate_every=0,
                evaluation_backlog=1,
                checkpoint_every=None,
                start_timeout_s=LONGEST_RUN_S,
                multi_turn=settings.turns > 1,
            ),
        )

    def _prompts(self, epoch: int, count: int | None) -> Iterator[tuple[int, int, Prompt]]:
        lengths, index = self.settings.prompt_lengths, 0
        while count is None or index < count:
            tokens = (1,) * lengths[index % len(lengths)]
            self.drawn.append(f"e{epoch}-p{index}")
            yield epoch, index, Prompt(prompt_id=str(index), tokens=tokens, text="", answer=None)
            index += 1

    def run(self) -> str:
        """To the end. Raises Violation, or what a part raises."""
        self.finish = self.loop.run()
        return self.finish

    def describe(self) -> str:
        control = self.control
        living = [
            (m.trajectory_id, m.state.value, m.instance, m.length) for m in control._trajectories.members()
        ]
        return f"{living}, buffer {control.view.placement()} from {control.view.next_buffer}"

    def _narrate(self, tell: Callable[[str], None]) -> None:
        handle, cycle = self.control.handle, self.control.cycle

        def told(what: object, actions: Sequence[object]) -> Any:
            tell(f"{self.now:9.4f}  {what}")
            for action in actions:
                tell(f"{'':15}{action}")
            return actions

        self.control.handle = lambda event: told(event, handle(event))  # type: ignore[method-assign]
        self.control.cycle = lambda now: told("cycle", cycle(now))  # type: ignore[method-assign]

    # ------------------------------------------------------------------ the ledger

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Keep a record."""
        self.lines.append(to_json(record, seq, attempt))
        self.records.append(record)

    def flush(self, *, sync: bool = False) -> None:
        """Nothing is written."""

    # ------------------------------------------------------------------ the listener

    def handlers(self) -> Handlers:
        """What is watched."""
        return {
            CommandSent: lambda event: self._ordered(event.command),
            ReportReceived: lambda event: self.watch.reported(event.report),
            InstanceJoined: self.watch.joined,
            InstanceLost: lambda event: self.watch.lost(event.instance, event.lengths),
            GivenUp: lambda event: self.given_up.add(event.trajectory_id),
            TurnEnded: self._turned,
        }

    def _ordered(self, command: Command) -> None:
        self._sent.append(command)
        self.watch.ordered(command)

    def _turned(self, event: TurnEnded) -> None:
        if not event.cycled:
            return
        sent, self._sent = self._sent, []
        if self.control.view.finished is None and isinstance(self.coordinator, WatchedCoordinator):
            lacking = [c for c in self.coordinator.decision.commands if c not in sent]
            if lacking:
                raise Violation(f"seed {self.settings.seed}, at {self.now:.3f} s: not carried out: {lacking}")
        self.watch.cycled(self.control)

    # ------------------------------------------------------------------ the backend

    def start(self) -> None:
        """Weights and instances come up, each when it does."""
        settings = self.settings
        self.newest = 0
        self._send("trainer", self.now, self._receive, TrainerUp(version=0, push_s=0.0))
        for number in range(len(settings.instances)):
            self._start(number, 1)
        if settings.stop_at is not None:
            self._foresee(settings.stop_at, self.loop.request_stop)

    def _receive(self, message: Message) -> None:
        """Something arrives at the loop."""
        self._messages.append(message)

    @property
    def more_now(self) -> bool:
        """See `Backend`."""
        return bool(self._messages) or self.clock.is_due

    def poll(self, until: float) -> Sequence[Message]:
        """What arrives next."""
        self.clock.advance(min(until, LONGEST_RUN_S), self._messages)
        if self.now >= LONGEST_RUN_S:
            raise Violation(f"seed {self.settings.seed}: no end after {self.now:.0f} s: {self.describe()}")
        messages = self._messages[:]
        self._messages.clear()
        return messages

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Commands are on their way."""
        self._send(f"to {instance}", self.now, self._deliver, instance, tuple(commands), dict(payloads))

    def respond(self, trajectories: Sequence[Trajectory]) -> None:
        """Environments answer a little later."""
        for trajectory in trajectories:
            answered = self.now + self.rng.random() * self.settings.score_s
            self._foresee(answered, self._answer, trajectory)

    def _answer(self, trajectory: Trajectory) -> None:
        answers = ((trajectory.trajectory_id, self._said(trajectory)),)
        self._receive(EnvironmentsAnswered(answers=answers))

    def _said(self, trajectory: Trajectory) -> Answer:
        turn = sum(not segment.generated for segment in trajectory.segments)
        if turn + 1 >= self.settings.turns:
            return Done()
        if self.settings.slow_tool:
            asked = self._asked.setdefault((trajectory.trajectory_id, turn), self.now)
            if self.now < asked + self.settings.slow_tool:
                return Waiting(limit_s=4 * self.settings.slow_tool)
        return Given(tokens=(2, 3))

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Each takes its time."""
        for trajectory in trajectories:
            seconds = self.settings.score_s * self.rng.random()
            self._foresee(self.now + seconds, self._scored, trajectory.trajectory_id)

    def _scored(self, trajectory_id: str) -> None:
        equal = self.rng.random() < self.settings.equal_rewards
        reward = Reward(raw=1.0 if equal else self.rng.random())
        self._receive(RewardsReady(((trajectory_id, reward),)))

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """A step takes its time, and so does its push."""
        self._check_bound(batch)
        seconds = self.settings.train_s * self.rng.uniform(0.5, 1.5)
        self._foresee(self.now + seconds, self._trained, batch)

    def save(self, version: int) -> None:
        """Never asked for."""
        raise AssertionError("nothing is to be saved")

    evaluate = release = save

    def close(self) -> None:
        """Engines hold nothing outside this process."""

    # ------------------------------------------------------------------ training

    def _check_bound(self, batch: TrainBatch) -> None:
        """By the versions that the engines stamped on the tokens."""
        consume = next(record for record in reversed(self.records) if isinstance(record, Consume))
        for reserved, group in zip(consume.groups, batch.groups, strict=True):
            for trajectory in (scored.trajectory for scored in group):
                oldest = trajectory.min_version
                if (
                    oldest is not None
                    and not batch.step - self.settings.kept_bound <= reserved.version <= oldest
                ):
                    raise Violation(
                        f"seed {self.settings.seed}: step {batch.step} trains {trajectory.trajectory_id}, "
                        f"tokens of version {oldest}, reserved at {reserved.version}"
                    )

    def _trained(self, batch: TrainBatch) -> None:
        members = []
        for group in batch.groups:
            self.trained.append(group[0].trajectory.group_id)
            for one in (scored.trajectory for scored in group):
                tokens = int(one.loss_mask.sum())
                oldest, newest = one.min_version, one.max_version
                if oldest is None or newest is None:  # masked before its first token
                    oldest = newest = batch.step
                hashed = token_hash(one.tokens)
                members.append(TrainedMember(one.trajectory_id, oldest, newest, tokens, hashed))
        done = StepTrained(step=batch.step, trained=tuple(members), metrics={}, update_s=0.0)
        self._send("trainer", self.now, self._receive, done)
        self._push(batch.step + 1)

    def _push(self, version: int) -> None:
        """The parameter server has it from now on; the loop learns of it a little later."""
        self.newest = version
        self._send("trainer", self.now, self._receive, WeightsPushed(version=version, seconds=0.0))

    # ------------------------------------------------------------------ what instances report

    def _updated(self, node: Node, update: InstanceUpdate) -> None:
        if not node.is_dead or self.rng.random() >= 0.5:
            self._receive(update)

    def _down(self, node: Node, reason: str) -> None:
        self._receive(InstanceDown(instance=node.name, incarnation=node.incarnation, reason=reason))
