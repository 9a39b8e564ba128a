"""A random cluster of real parts: `Control` with a policy, rollout instances with fake engines that share the
scheduler of the real ones, the trajectory server, and a ledger; on a virtual clock, all by one seed.

::

    Control ──Send──> channel ──> RolloutInstance ──report──> channel ──> TrajectoryServer, Control
       └──Train──> trainer (slow) ──Pushed──> channel ──┘        (each channel keeps its order)

Between them messages take their time; instances die and start anew, pulls are refused, trajectories are
forgotten. The order of things inside a turn is that of `runtime.loop`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cluster_instances import Instances, Node
from cluster_settings import ClusterSettings
from cluster_watch import Violation
from watched_coordinator import WatchedCoordinator

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
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.events import (
    Ended,
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
    TurnGiven,
    WaitingExternal,
)
from staleflow.data.environment import Done, Given, Waiting
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.trajectory import FinishReason, Prompt, Reward, TrainBatch, Trajectory, token_hash
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Consume, Record, Start, Trained, TrainedMember, to_json
from staleflow.servers.trajectory_server import FAILED, TrajectoryServer
from staleflow.training.filtering import is_uninformative

HEARTBEAT_S = 0.5
"""Longest time between two cycles."""
LONGEST_RUN_S = 2000.0
"""A run that takes longer hangs: even a source of 14 prompts on one slow instance takes a tenth of this."""


class RandomCluster(Instances):
    """One run. `run` plays it to the end, and returns the reason that it ended for."""

    def __init__(self, settings: ClusterSettings, tell: Callable[[str], None] | None = None) -> None:
        """`tell` is told what happens, for somebody who looks at one seed."""
        super().__init__(settings)
        self._tell_story = tell
        self.lines: list[str] = []
        self.records: list[Record] = []
        self.coordinator = WatchedCoordinator(settings, random.Random(settings.seed))
        self.control = Control(
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
        self.drawn: list[str] = []
        self.server = TrajectoryServer(
            prompts=self._prompts(0, settings.prompts),
            padding=self._prompts(1, None),
            members=settings.group_size + settings.surplus,
            max_new_tokens=settings.max_new_tokens,
        )
        self.finish: str | None = None
        self.trained: list[str] = []
        self.given_up: set[str] = set()
        self._cycle_at: float | None = None
        self._events: deque[Event] = deque()
        self._is_working = False
        self._outgoing: dict[str, list[Command]] = {}
        self._to_score: list[str] = []
        self._external: dict[str, None] = {}
        self._asked: dict[tuple[str, int], float] = {}

    def _prompts(self, epoch: int, count: int | None) -> Iterator[tuple[int, int, Prompt]]:
        lengths, index = self.settings.prompt_lengths, 0
        while count is None or index < count:
            tokens = (1,) * lengths[index % len(lengths)]
            self.drawn.append(f"e{epoch}-p{index}")
            yield epoch, index, Prompt(prompt_id=str(index), tokens=tokens, text="", answer=None)
            index += 1

    # ------------------------------------------------------------------ the clock

    def run(self) -> str:
        """To the end. Raises Violation, or whatever a part raises."""
        settings = self.settings
        self._perform(
            self.control.note(
                Start(
                    bound=settings.kept_bound,
                    batch_size=settings.batch_size,
                    group_size=settings.group_size,
                    last_batch=settings.last_batch,
                    spare_limit=settings.spare_groups,
                )
            )
        )
        self._push(0)
        for number in range(len(settings.instances)):
            self._start(number, 1)
        if settings.stop_at is not None:
            self._foresee(settings.stop_at, self._receive, StopRequested())
        self._foresee(HEARTBEAT_S, self._beat)
        while self.finish is None:
            self._next()
            if self.now > LONGEST_RUN_S:
                raise Violation(f"seed {settings.seed}: no end after {self.now:.0f} s: {self.describe()}")
        return self.finish

    def describe(self) -> str:
        control = self.control
        living = [
            (m.trajectory_id, m.state.value, m.instance, m.length) for m in control._trajectories.members()
        ]
        return f"{living}, buffer {control.view.placement()} from {control.view.next_buffer}"

    def _story(self, *what: object) -> None:
        if self._tell_story is not None:
            self._tell_story(f"{self.now:9.4f}  " + " ".join(map(str, what)))

    # ------------------------------------------------------------------ Control and its loop

    def _beat(self) -> None:
        self._ask_for_cycle(self.now)
        self._foresee(self.now + HEARTBEAT_S, self._beat)

    def _ask_for_cycle(self, at: float) -> None:
        if self._cycle_at is None or at < self._cycle_at:
            self._cycle_at = at
            self._foresee(at, self._cycle, at)

    def _cycle(self, at: float) -> None:
        if self._cycle_at != at:
            return  # one was due earlier
        self._cycle_at = None
        for trajectory_id in list(self._external):
            if trajectory_id in self.server:
                self._after_turn_end(trajectory_id)
            else:
                del self._external[trajectory_id]
        actions = self.control.cycle(self.now)
        if self.control.view.finished is None:
            sent = [e.command for e in actions if isinstance(e, Send)]
            lacking = [c for c in self.coordinator.decision.commands if c not in sent]
            if lacking:
                raise Violation(f"seed {self.settings.seed}, at {self.now:.3f} s: not carried out: {lacking}")
        self._perform(actions)
        self.watch.cycled(self.control)
        self._send_off()
        if self.control.view.wake_at is not None:
            self._ask_for_cycle(self.control.view.wake_at)

    def _receive(self, event: Event) -> None:
        """Something arrives at the control side."""
        if isinstance(event, InstanceJoined):
            self.watch.joined(event)
        self._take(event)
        self._ask_for_cycle(self.now + self.rng.random() * self.settings.cycle_delay)

    def _take(self, event: Event) -> None:
        self._events.append(event)
        if not self._is_working:
            self._perform([])

    def _perform(self, actions: Sequence[Action]) -> None:
        self._is_working = True
        self._apply(actions)
        while self._events:
            event = self._events.popleft()
            self._story(event)
            self._apply(self.control.handle(event))
        self._is_working = False

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._story("   ", action)
            match action:
                case Append(record=record, seq=seq, attempt=attempt):
                    self.lines.append(to_json(record, seq, attempt))
                    self.records.append(record)
                case Send(command=command):
                    self.watch.ordered(command)
                    self._outgoing.setdefault(command.instance, []).append(command)
                case Score(trajectory_id=trajectory_id):
                    self._after_turn_end(trajectory_id)
                case DrawGroups(count=count, padding=padding):
                    groups, exhausted = self.server.draw(count, padding=padding)
                    self._take(GroupsDrawn(groups=groups))
                    if exhausted:
                        self._take(SourceExhausted())
                case Discard(trajectory_ids=ids, reason=reason):
                    self.server.discard(ids, reason)
                case GiveUp(trajectory_id=trajectory_id):
                    self.given_up.add(trajectory_id)
                    self.server.give_up(trajectory_id)
                case Resample(trajectory_id=trajectory_id, new_id=new_id):
                    self.server.resample(trajectory_id, new_id)
                case Truncate(trajectory_id=trajectory_id):
                    self.server.truncate(trajectory_id)
                case Train(step=step, groups=members, final=final):
                    batch = self.server.batch(step, members, final)
                    self._check_bound(batch)
                    seconds = self.settings.train_s * self.rng.uniform(0.5, 1.5)
                    self._foresee(self.now + seconds, self._trained, batch)
                case Finish(reason=reason):
                    self.finish = reason

    def _send_off(self) -> None:
        for name, commands in self._outgoing.items():
            payloads = {
                c.trajectory_id: self.server.get(c.trajectory_id)
                for c in commands
                if isinstance(c, Route) and c.trajectory_id in self.server
            }
            self._send(f"to {name}", self.now, self._deliver, name, commands, payloads)
        self._outgoing = {}
        for trajectory_id in self._to_score:
            seconds = self.settings.score_s * self.rng.random()
            self._foresee(self.now + seconds, self._scored, trajectory_id)
        self._to_score = []

    # ------------------------------------------------------------------ environment and reward

    def _respond(self, trajectory: Trajectory) -> Given | Waiting | Done:
        turn = sum(not segment.generated for segment in trajectory.segments)
        if turn + 1 >= self.settings.turns:
            return Done()
        if self.settings.slow_tool:
            asked = self._asked.setdefault((trajectory.trajectory_id, turn), self.now)
            if self.now < asked + self.settings.slow_tool:
                return Waiting(limit_s=4 * self.settings.slow_tool)
        return Given(tokens=(2, 3))

    def _after_turn_end(self, trajectory_id: str) -> None:
        trajectory = self.server.get(trajectory_id)
        waited = trajectory_id in self._external
        stopped = trajectory.finish_reason is FinishReason.STOP
        answer = self._respond(trajectory) if stopped else Done()
        if isinstance(answer, Waiting):
            if not waited:
                self._external[trajectory_id] = None
                self._take(WaitingExternal(trajectory_id=trajectory_id, limit_s=answer.limit_s))
            return
        self._external.pop(trajectory_id, None)
        if trajectory.finish_reason is FinishReason.FAILED:
            self._reward(trajectory_id, FAILED)
            return
        trajectory = self.server.answer(trajectory_id, answer)
        if trajectory.finish_reason is None:
            self._take(TurnGiven(trajectory_id=trajectory_id, length=trajectory.length))
            return
        if waited:
            self._take(Ended(trajectory_id=trajectory_id))
        self._to_score.append(trajectory_id)

    def _scored(self, trajectory_id: str) -> None:
        if trajectory_id in self.server:
            equal = self.rng.random() < self.settings.equal_rewards
            self._reward(trajectory_id, Reward(raw=1.0 if equal else self.rng.random()))
            self._ask_for_cycle(self.now + self.rng.random() * self.settings.cycle_delay)

    def _reward(self, trajectory_id: str, reward: Reward) -> None:
        self.server.set_reward(trajectory_id, reward)
        hashed = token_hash(self.server.get(trajectory_id).tokens)
        self._take(
            Rewarded(trajectory_id=trajectory_id, raw=reward.raw, usable=reward.usable, token_hash=hashed)
        )

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
        record = Trained(step=batch.step, version=batch.step, trajectories=tuple(members))
        self._send("trainer", self.now, self._step_done, record)
        self._push(batch.step + 1)

    def _step_done(self, record: Trained) -> None:
        self._receive(TrainedStep(record=record))
        self.server.trained(record.step)

    def _push(self, version: int) -> None:
        """The parameter server has it from now on; Control learns of it a little later."""
        self.newest = version
        self._send("trainer", self.now, self._receive, Pushed(version=version))

    # ------------------------------------------------------------------ what instances tell

    def _updated(self, node: Node, update: InstanceUpdate) -> None:
        if node.is_dead and self.rng.random() < 0.5:
            return
        self.server.absorb(update.deltas)
        self.watch.reported(update.report)
        self._receive(Reported(report=update.report))

    def _down(self, node: Node, reason: str) -> None:
        self._outgoing.pop(node.name, None)
        lengths = self.server.lengths(self.control.view.resident(node.name))
        self.watch.lost(node.name, lengths)
        self._receive(
            InstanceLost(instance=node.name, incarnation=node.incarnation, lengths=lengths, reason=reason)
        )
