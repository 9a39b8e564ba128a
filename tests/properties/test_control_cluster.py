"""`Control` on random clusters: every invariant at every step, and the independent audit at the end.

The world below is a cluster without engines: instances decode one token a turn, report late, refuse, forget
trajectories and die, all by a seed. Payload is counts and versions only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from staleflow.audit import audit_ledger
from staleflow.coordination.actions import (
    Abort,
    Action,
    Append,
    Command,
    Discard,
    DrawGroups,
    Finish,
    GiveUp,
    Interrupt,
    Pull,
    Resample,
    Route,
    Score,
    Send,
    Train,
    Truncate,
)
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.events import (
    DrawnGroup,
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Pushed,
    Rejection,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrajectoryReport,
)
from staleflow.coordination.migration import NaiveMigration
from staleflow.coordination.routing import NaiveRouting
from staleflow.coordination.stragglers import StragglerRule
from staleflow.coordination.synchronization import NaiveSynchronization
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import LastBatch, Start, Trained, TrainedMember, to_json
from staleflow.training.filtering import is_uninformative

PROMPT = 5


@dataclass
class Instance:
    name: str
    incarnation: int
    version: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Version of each token, by trajectory here."""
    inbox: list[Command] = field(default_factory=list)
    acked: int = 0
    revision: int = 0
    generated: int = 0
    finished: list[TrajectoryReport] = field(default_factory=list)
    interrupted: list[TrajectoryReport] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)


class World:
    """A cluster by seed. `run` plays it to the end and returns the ledger's path."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        bound: int = 1,
        batch_size: int = 2,
        group_size: int = 2,
        steps: int = 5,
        instances: int = 3,
        prompts: int | None = None,
        last_batch: LastBatch = "train",
        surplus: int = 0,
        spares: int = 0,
        rule: StragglerRule | None = None,
        coordinator: Coordinator | None = None,
        trouble: float = 0.0,
        same_reward: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.path = folder / f"ledger-{seed}.jsonl"
        self.group_size, self.surplus, self.trouble, self.same_reward = (
            group_size,
            surplus,
            trouble,
            same_reward,
        )
        self.bound, self.steps, self.prompts_left = bound, steps, prompts
        self.batch_size, self.last_batch = batch_size, last_batch
        self.lines: list[str] = []
        self.control = Control(
            buffer=StalenessBuffer(bound=bound, batch_size=batch_size, spare_limit=spares),
            coordinator=coordinator
            or Coordinator(
                routing=NaiveRouting(), synchronization=NaiveSynchronization(), migration=NaiveMigration()
            ),
            batches=BatchSettings(
                steps=steps, group_size=group_size, last_batch=last_batch, max_filtered_batches=20
            ),
            patience=Patience(stall_after_s=30, max_retries=3),
            stragglers=rule,
            expected_response=4,
            group_filter=is_uninformative,
        )
        self.fleet = {f"i{n}": Instance(f"i{n}", 1, 0) for n in range(instances)}
        self.stored: dict[str, list[int]] = {}
        self.version = -1
        self.now = 0.0
        self.drawn = 0
        self.expired: list[str] = []
        """Groups whose prompts are to be drawn again."""
        self.straggled: list[str] = []
        """Trajectories sampled anew, or cut."""
        self.training: tuple[int, Train] | None = None
        self.scoring: list[str] = []
        self.finish: str | None = None
        self.trained_groups: list[str] = []
        self.given_up: list[str] = []
        self.moves: dict[str, int] = {}
        self.perform(
            self.control.note(
                Start(
                    bound=bound,
                    batch_size=batch_size,
                    group_size=group_size,
                    last_batch=last_batch,
                    spare_limit=spares,
                )
            )
        )

    # -------------------------------------------------------------- driving

    def tell(self, event: Event) -> None:
        self.perform(self.control.handle(event))
        self.check()

    def run(self, turns: int = 4000) -> Path:
        self.push(0)
        for instance in self.fleet.values():
            self.join(instance)
        for _ in range(turns):
            if self.finish is not None:
                break
            self.turn()
        self.path.write_text("".join(line + "\n" for line in self.lines))
        assert self.finish is not None, f"no end after {turns} turns: {self.describe()}"
        assert list(self.control._trajectories.members()) == []
        assert self.stored == {}, "payload is left behind"
        return self.path

    def turn(self) -> None:
        self.now += 1.0
        self.perform(self.control.cycle(self.now))
        self.check()
        for instance in list(self.fleet.values()):
            self.decode(instance)
            if self.rng.random() < 0.5:
                self.report(instance)
            if self.rng.random() < self.trouble / 20:
                self.die(instance)
        while self.scoring and self.rng.random() < 0.8:
            self.score(self.scoring.pop(self.rng.randrange(len(self.scoring))))
        if self.training is not None and self.rng.random() < 0.1:
            step, effect = self.training
            self.training = None
            self.train(step, effect)

    def describe(self) -> str:
        states = {s: self.control.view.count(s) for s in TrajectoryState}
        return f"{states}, next {self.control.view.next_buffer}, version {self.version}"

    # -------------------------------------------------------------- actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Append(record=record, seq=seq, attempt=attempt):
                    assert seq == len(self.lines)
                    self.lines.append(to_json(record, seq, attempt))
                case Send(command=command):
                    self.send(command)
                case Score(trajectory_id=trajectory_id):
                    self.scoring.append(trajectory_id)
                case GiveUp(trajectory_id=trajectory_id):
                    self.given_up.append(trajectory_id)
                case DrawGroups(count=count, padding=padding):
                    self.draw(count, padding)
                case Train(step=step):
                    assert self.training is None, "two batches at once"
                    self.training = (step, action)
                case Discard(trajectory_ids=ids, reason=reason):
                    for trajectory_id in ids:
                        self.stored.pop(trajectory_id)
                    if reason == "expired":
                        self.expired += {t.rpartition("-m")[0] for t in ids}
                case Resample(trajectory_id=trajectory_id, new_id=new_id):
                    del self.stored[trajectory_id]
                    self.stored[new_id] = []
                    self.straggled.append(trajectory_id)
                case Truncate(trajectory_id=trajectory_id):
                    assert self.stored[trajectory_id]
                    self.straggled.append(trajectory_id)
                case Finish(reason=reason):
                    self.finish = reason

    def draw(self, count: int, padding: bool) -> None:
        again, self.expired = self.expired[:count], self.expired[count:]
        fresh = count - len(again)
        available = fresh if self.prompts_left is None or padding else min(fresh, self.prompts_left)
        if self.prompts_left is not None and not padding:
            self.prompts_left -= available
        names = [f"{use}-a{int(attempt) + 1}" for use, _, attempt in (g.rpartition("-a") for g in again)]
        names += [f"e{1 if padding else 0}-p{self.drawn + n}-a0" for n in range(available)]
        self.drawn += available
        groups = []
        for group in names:
            members = tuple(f"{group}-m{m}" for m in range(self.group_size + self.surplus))
            self.stored |= {m: [] for m in members}
            groups.append(
                DrawnGroup(
                    group_id=group, members=members, prompt_length=PROMPT, redrawn=not group.endswith("-a0")
                )
            )
        self.tell(GroupsDrawn(groups=tuple(groups)))
        if available < fresh:
            self.tell(SourceExhausted())

    def send(self, command: Command) -> None:
        instance = self.fleet[command.instance]
        if command.incarnation == instance.incarnation:
            instance.inbox.append(command)
        if isinstance(command, Route):
            self.moves[command.trajectory_id] = self.moves.get(command.trajectory_id, 0) + 1

    def train(self, step: int, action: Train) -> None:
        trained = []
        for group_id, members in action.groups:
            self.trained_groups.append(group_id)
            for member in members:
                versions = self.stored.pop(member)
                if versions:  # a masked member has none
                    assert min(versions) + self.bound >= step
                trained.append(
                    TrainedMember(
                        id=member,
                        min=min(versions, default=step),
                        max=max(versions, default=step),
                        tokens=len(versions),
                        hash="h" + member,
                    )
                )
        self.tell(TrainedStep(record=Trained(step=step, version=step, trajectories=tuple(trained))))
        self.push(step + 1)

    def push(self, version: int) -> None:
        self.version = version
        self.tell(Pushed(version=version))

    def score(self, trajectory_id: str) -> None:
        if trajectory_id not in self.stored:
            return
        failed = trajectory_id in self.given_up
        raw = 1.0 if self.rng.random() < self.same_reward else self.rng.random()
        self.tell(
            Rewarded(trajectory_id=trajectory_id, raw=raw, usable=not failed, token_hash="h" + trajectory_id)
        )

    # -------------------------------------------------------------- instances

    def join(self, instance: Instance) -> None:
        instance.version = max(0, self.version)
        self.tell(
            InstanceJoined(
                instance=instance.name,
                incarnation=instance.incarnation,
                version=instance.version,
                kv_capacity=60,
                max_running=3,
            )
        )

    def decode(self, instance: Instance) -> None:
        for _ in range(self.rng.randrange(3)):
            if instance.inbox:
                self.apply(instance, instance.inbox.pop(0))
        for trajectory_id, versions in list(instance.tokens.items()):
            if self.rng.random() < 0.2:
                continue
            versions.append(instance.version)
            instance.generated += 1
            if self.rng.random() < 0.12:
                del instance.tokens[trajectory_id]
                if self.rng.random() < self.trouble / 10:
                    continue  # F15: the result is swallowed
                instance.finished.append(self.describe_trajectory(trajectory_id, versions, "stop"))

    def apply(self, instance: Instance, command: Command) -> None:
        assert command.seq == instance.acked + 1, "commands must arrive gap-free and in order"
        instance.acked = command.seq
        match command:
            case Route(trajectory_id=trajectory_id):
                assert trajectory_id not in instance.tokens
                if instance.version < command.min_version:
                    instance.rejections.append(
                        Rejection(
                            seq=command.seq, trajectory_id=trajectory_id, reason="old", stale_version=True
                        )
                    )
                elif trajectory_id in self.stored:
                    instance.tokens[trajectory_id] = list(self.stored[trajectory_id])
            case Interrupt(trajectory_id=trajectory_id):
                versions = instance.tokens.pop(trajectory_id, None)
                if versions is not None:
                    instance.interrupted.append(self.describe_trajectory(trajectory_id, versions, None))
            case Abort(trajectory_id=trajectory_id):
                instance.tokens.pop(trajectory_id, None)
            case Pull():
                if self.rng.random() < self.trouble / 2:
                    instance.rejections.append(
                        Rejection(seq=command.seq, trajectory_id=None, reason="pull failed")
                    )
                else:
                    instance.version = self.version

    def describe_trajectory(
        self, trajectory_id: str, versions: list[int], reason: str | None
    ) -> TrajectoryReport:
        if trajectory_id in self.stored:
            self.stored[trajectory_id] = list(versions)
        return TrajectoryReport(
            trajectory_id=trajectory_id,
            length=PROMPT + len(versions),
            min_version=min(versions, default=None),
            finish_reason=reason,
        )

    def report(self, instance: Instance) -> None:
        instance.revision += 1
        for trajectory_id, versions in instance.tokens.items():
            if trajectory_id in self.stored:
                self.stored[trajectory_id] = list(versions)
        report = InstanceReport(
            instance=instance.name,
            incarnation=instance.incarnation,
            revision=instance.revision,
            version=instance.version,
            acked_seq=instance.acked,
            rejections=tuple(instance.rejections),
            finished=tuple(instance.finished),
            interrupted=tuple(instance.interrupted),
            lengths=tuple((t, PROMPT + len(v)) for t, v in instance.tokens.items() if v),
            running=len(instance.tokens),
            kv_tokens=sum(PROMPT + len(v) for v in instance.tokens.values()),
            kv_capacity=60,
            generated_tokens=instance.generated,
        )
        instance.rejections, instance.finished, instance.interrupted = [], [], []
        self.tell(Reported(report=report))

    def die(self, instance: Instance) -> None:
        resident = self.control.view.resident(instance.name)
        lengths = tuple((t, PROMPT + len(self.stored[t])) for t in resident if t in self.stored)
        self.fleet[instance.name] = Instance(instance.name, instance.incarnation + 1, 0)
        self.tell(
            InstanceLost(
                instance=instance.name, incarnation=instance.incarnation, lengths=lengths, reason="killed"
            )
        )
        self.join(self.fleet[instance.name])

    # -------------------------------------------------------------- invariants

    def check(self) -> None:
        control = self.control
        c = control.view.next_buffer
        placed: dict[str, str] = {}
        for name in control.view.instances():
            for trajectory_id in control.view.resident(name):
                assert trajectory_id not in placed, "one trajectory on two instances"
                placed[trajectory_id] = name
        for member in control._trajectories.members():
            running = member.state is TrajectoryState.RUNNING
            assert running == (member.trajectory_id in placed)
            waits = member.state is TrajectoryState.PENDING
            assert waits == (member.trajectory_id in control._trajectories.pending)
        for group in control._trajectories.groups():
            assert (group.version is not None) == (group.group_id in control._buffer)
            if group.version is not None:
                assert group.version + self.bound >= c, "a reserved group fell behind the bound"
        firm, spares = control.view.firm_count, control.view.spare_count
        assert firm + spares == len(control._buffer)
        assert firm <= (self.bound + 1) * self.batch_size
        assert spares <= control.view.spare_limit
        assert set(self.stored) >= {m.trajectory_id for m in control._trajectories.members()}


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("trouble", [0.0, 0.3])
def test_random_clusters_keep_every_invariant_and_pass_the_audit(
    bound: int, trouble: float, tmp_path: Path
) -> None:
    """F2, F3, F15, F16: bound kept at consume, no hang, whatever dies, refuses or forgets."""
    seen = 0
    for seed in range(40):
        world = World(seed, tmp_path, bound=bound, trouble=trouble, same_reward=0.3 * (seed % 3))
        report = audit_ledger(world.run())
        assert report.violations == ()
        assert world.finish == "completed"
        seen = max(seen, report.max_staleness or 0)
    assert seen == bound, "the bound is reached, and never exceeded"


@pytest.mark.parametrize("last_batch", ["train", "drop", "pad"])
def test_a_source_of_seven_prompts_ends_by_the_stated_policy(last_batch: LastBatch, tmp_path: Path) -> None:
    """F17: 7 prompts, batch 4: a last batch of 3, none, or one filled up with the next epoch's."""
    for seed in range(10):
        world = World(seed, tmp_path, batch_size=4, prompts=7, steps=50, last_batch=last_batch)
        assert audit_ledger(world.run()).violations == ()
        assert world.finish == "exhausted"
        own = [g for g in world.trained_groups if g.startswith("e0")]
        expected = {"train": (7, 7), "drop": (4, 4), "pad": (8, 7)}[last_batch]
        assert (len(world.trained_groups), len(own)) == expected
        assert len(set(world.trained_groups)) == len(world.trained_groups)


def test_a_source_that_only_gives_equal_rewards_ends_with_that_reason(tmp_path: Path) -> None:
    """F26: everything is filtered; the run ends instead of filtering for ever."""
    world = World(1, tmp_path, same_reward=1.0)
    assert audit_ledger(world.run(8000)).violations == ()
    assert world.finish == "filtered_out"
    assert world.trained_groups == []


def test_surplus_members_are_aborted_and_the_first_ones_are_trained(tmp_path: Path) -> None:
    for seed in range(10):
        world = World(seed, tmp_path, surplus=1)
        report = audit_ledger(world.run())
        assert report.violations == ()
        trained = sum(line.count('"min":') for line in world.lines)
        assert trained == 5 * 2 * 2


def test_a_trajectory_that_fails_for_ever_is_given_up_and_its_group_still_trains(tmp_path: Path) -> None:
    """F15, F25: after max_retries the member is masked; no group waits for it for ever."""
    world = World(0, tmp_path, instances=1, group_size=3)
    victim = "e0-p0-a0-m0"
    original = world.apply

    def forgetful(instance: Instance, command: Command) -> None:
        original(instance, command)
        instance.tokens.pop(victim, None)

    world.apply = forgetful  # type: ignore[method-assign]
    assert audit_ledger(world.run()).violations == ()
    assert world.given_up == [victim]
    assert world.moves[victim] == 4
    assert "e0-p0-a0" in world.trained_groups


def test_a_stop_request_ends_the_run_after_the_step_in_training(tmp_path: Path) -> None:
    world = World(3, tmp_path, steps=100)
    world.push(0)
    for instance in world.fleet.values():
        world.join(instance)
    while world.control.view.next_buffer < 3:
        world.turn()
    world.tell(StopRequested())
    assert world.training is not None
    assert world.finish is None
    while world.finish is None:
        world.turn()
    assert world.finish == "interrupted"
    assert world.control.view.next_buffer == 3
    assert world.version == 3


def test_the_same_seed_gives_the_same_ledger(tmp_path: Path) -> None:
    first = World(5, tmp_path, trouble=0.3).run().read_bytes()
    assert World(5, tmp_path, trouble=0.3).run().read_bytes() == first
