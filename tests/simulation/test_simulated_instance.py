"""The simulated instance against a loop that looks at every token and queues with the engines' scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import groupby

import pytest

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.cost_model import CostModel
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.rollout.engine import OnPull
from staleflow.rollout.scheduler import Generation, Scheduler
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.trajectory import SimulatedTrajectory

COSTS = CostModel(k1=3e-4, k2=0.021, k3=0.009, k4=0.0047, prefill=0.0013, pull=0.37)
PROMPT = 4


Left = dict[str, tuple[float, list[tuple[int, int]]]]
"""By trajectory: when its leaving was told, and its response tokens by weight version."""


@dataclass
class Outcome:
    """What happened."""

    finished: Left = field(default_factory=dict)
    interrupted: Left = field(default_factory=dict)
    aborted: Left = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    busy: float = 0.0
    pulling: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)


class TokenByToken:
    """The oracle: one decode step after the other, around `rollout.scheduler`."""

    def __init__(self, kv_capacity: int, max_running: int, on_pull: OnPull, targets: dict[str, int]) -> None:
        self.scheduler = Scheduler(kv_capacity=kv_capacity, max_running=max_running, max_model_len=10**6)
        self.on_pull, self.targets = on_pull, targets
        self.now, self.version = 0.0, 0
        self.news: list[tuple[Left, str, list[tuple[int, int]]]] = []
        self.outcome = Outcome()
        names = ("steps", "running_steps", "kv_token_steps", "prefilled", "generated", "pulls", "preemptions")
        self.outcome.counters = dict.fromkeys(names, 0)

    def run(self, inbox: list[tuple[float, Command]]) -> Outcome:
        inbox = list(inbox)
        counters = self.outcome.counters
        while True:
            while inbox and inbox[0][0] <= self.now:
                self.obey(inbox.pop(0)[1])
            for kind, identity, runs in self.news:  # an engine that pulls says nothing meanwhile
                kind[identity] = (self.now, runs)
            self.news.clear()
            schedule = self.scheduler.schedule()
            running, kv = self.scheduler.running, self.scheduler.kv_tokens
            if not running:
                if not inbox:
                    break
                self.now = max(self.now, inbox[0][0])
                continue
            built = sum(g.length for g in schedule.admitted)
            seconds = COSTS.step_s(len(running), kv) + COSTS.prefill_s(built)
            self.now += seconds
            self.outcome.busy += seconds
            for name, amount in (
                ("steps", 1),
                ("running_steps", len(running)),
                ("kv_token_steps", kv),
                ("prefilled", built),
                ("generated", len(running)),
            ):
                counters[name] += amount
            ended = []
            for generation in running:
                generation.append(0, -1.0, self.version)
                if generation.length == self.targets[generation.trajectory_id]:
                    ended.append(generation)
            self.scheduler.remove(g.trajectory_id for g in ended)
            for generation in ended:
                self.leaves(self.outcome.finished, generation)
        counters["preemptions"] = self.scheduler.preemptions
        return self.outcome

    def obey(self, command: Command) -> None:
        match command:
            case Route(trajectory_id=identity):
                if self.version < command.min_version:
                    self.outcome.rejected.append(command.seq)
                else:
                    prompt = Prompt(prompt_id="p", tokens=(1,) * PROMPT, text="", answer=None)
                    self.scheduler.add(
                        Trajectory(
                            trajectory_id=identity,
                            group_id="g",
                            member=0,
                            prompt=prompt,
                            max_new_tokens=10**6,
                        )
                    )
            case Interrupt(trajectory_id=identity) | Abort(trajectory_id=identity):
                gone, _ = self.scheduler.remove([identity])
                kind = self.outcome.interrupted if isinstance(command, Interrupt) else self.outcome.aborted
                for generation in gone:
                    self.leaves(kind, generation)
            case Pull():
                self.version += 1
                kv = self.scheduler.kv_tokens if self.on_pull == "recompute" else 0
                seconds = COSTS.pull + COSTS.prefill_s(kv)
                self.now += seconds
                self.outcome.pulling += seconds
                self.outcome.counters["pulls"] += 1

    def leaves(self, kind: Left, generation: Generation) -> None:
        runs = [(version, len(list(tokens))) for version, tokens in groupby(generation.versions)]
        self.news.append((kind, generation.trajectory_id, runs))


def simulated(
    rng: random.Random,
    kv_capacity: int,
    max_running: int,
    on_pull: OnPull,
    targets: dict[str, int],
    inbox: list[tuple[float, Command]],
) -> Outcome:
    """The same in closed form, looked at (`settle`) at random moments in between."""
    known = {
        i: SimulatedTrajectory(i, "g", prompt=PROMPT, target=target, truncated=False)
        for i, target in targets.items()
    }
    pulled = iter(range(1, 1000))
    instance = SimulatedInstance(
        instance="i",
        incarnation=1,
        version=0,
        costs=COSTS,
        kv_capacity=kv_capacity,
        max_running=max_running,
        on_pull=on_pull,
        find=known.get,
        newest=lambda: next(pulled),
    )
    outcome = Outcome()
    coming = [(max(0.0, arrival - rng.uniform(0, 0.5)), arrival, command) for arrival, command in inbox]
    coming = [(min(s for s, _, _ in coming[k:]), a, c) for k, (_, a, c) in enumerate(coming)]  # in order
    while coming or instance.next_event is not None:
        event = instance.next_event
        if coming and (event is None or coming[0][0] <= event):
            sent, arrival, command = coming.pop(0)
            if rng.random() < 0.5:
                instance.settle(sent)
            instance.deliver(arrival, command)
            instance.replan()
            continue
        assert event is not None
        if rng.random() < 0.5:
            instance.settle(rng.uniform(instance.at, max(instance.at, event)))
        instance.advance()
        if instance.has_news and instance.at <= event:
            report = instance.take_report(progress=rng.random() < 0.3)
            assert report.kv_tokens <= kv_capacity
            assert report.running <= max_running
            for kind, entries in (
                (outcome.finished, report.finished),
                (outcome.interrupted, report.interrupted),
            ):
                for entry in entries:
                    trajectory = known[entry.trajectory_id]
                    assert entry.length == PROMPT + sum(tokens for _, tokens in trajectory.runs)
                    kind[entry.trajectory_id] = (instance.at, list(trajectory.runs))
            for identity in report.aborted:
                outcome.aborted[identity] = (instance.at, list(known[identity].runs))
            outcome.rejected += [rejection.seq for rejection in report.rejections]
    assert instance.running == instance.waiting == instance.kv_tokens == 0
    outcome.busy, outcome.pulling = instance.busy_s, instance.pull_s
    outcome.counters = {
        "steps": instance.steps,
        "running_steps": instance.running_steps,
        "kv_token_steps": instance.kv_token_steps,
        "prefilled": instance.prefilled,
        "generated": instance.generated,
        "pulls": instance.pulls,
        "preemptions": instance.preemptions,
    }
    return outcome


def random_inbox(rng: random.Random, targets: dict[str, int]) -> list[tuple[float, Command]]:
    inbox: list[tuple[float, Command]] = []
    now = 0.0

    def put(make: type[Command], **fields: object) -> None:
        seq = len(inbox) + 1
        inbox.append((now, make(instance="i", incarnation=1, seq=seq, **fields)))  # type: ignore[arg-type]

    for number, identity in enumerate(targets):
        now += rng.choice((0.0, rng.expovariate(4)))
        minimum = 2 if rng.random() < 0.1 else 0
        put(Route, trajectory_id=identity, group_id="g", min_version=minimum)
        draw = rng.random()
        if draw < 0.45:
            now += rng.expovariate(2)
        other = rng.choice(list(targets)[: number + 1])
        if draw < 0.1:
            put(Interrupt, trajectory_id=other)
        elif draw < 0.2:
            put(Abort, trajectory_id=other)
        elif draw < 0.35:
            put(Pull, version=0)
    return inbox


@pytest.mark.parametrize("on_pull", ["recompute", "keep_kv"])
def test_closed_form_decoding_equals_the_loop_over_tokens(on_pull: OnPull) -> None:
    """Times, tokens, versions and counters: with preemption, interrupts in the middle of steps, and pulls."""
    preempted = interrupted = pulled = 0
    for seed in range(400):
        rng = random.Random(seed)
        kv_capacity = rng.randrange(30, 160)
        max_running = rng.choice((1, 2, 3, 5, 40))
        targets = {f"t{k}": PROMPT + rng.randrange(1, 25) for k in range(rng.randrange(1, 25))}
        inbox = random_inbox(rng, targets)
        want = TokenByToken(kv_capacity, max_running, on_pull, targets).run(inbox)
        got = simulated(rng, kv_capacity, max_running, on_pull, targets, inbox)
        assert got.counters == want.counters, seed
        assert got.rejected == want.rejected, seed
        for ours, theirs in (
            (got.finished, want.finished),
            (got.interrupted, want.interrupted),
            (got.aborted, want.aborted),
        ):
            assert {i: runs for i, (_, runs) in ours.items()} == {i: runs for i, (_, runs) in theirs.items()}
            for identity, (at, _) in ours.items():
                assert at == pytest.approx(theirs[identity][0], rel=1e-9), (seed, identity)
        assert got.busy == pytest.approx(want.busy, rel=1e-9)
        assert got.pulling == pytest.approx(want.pulling, rel=1e-9)
        preempted += want.counters["preemptions"]
        interrupted += len(want.interrupted)
        pulled += want.counters["pulls"]
    assert min(preempted, interrupted, pulled) > 100, "the cases contain what they are about"


def test_one_trajectory_alone_by_hand() -> None:
    """Prompt 4, 3 new tokens: prefill of 4, then steps over 4, 5 and 6 cached tokens."""
    trajectory = SimulatedTrajectory("t", "g", prompt=4, target=7, truncated=False)
    instance = SimulatedInstance(
        instance="i",
        incarnation=1,
        version=3,
        costs=CostModel(k1=0.001, k2=0.02, k3=0.03, k4=0.1, prefill=0.01, pull=0),
        kv_capacity=100,
        max_running=4,
        on_pull="recompute",
        find={"t": trajectory}.get,
        newest=lambda: 3,
        began=10.0,
    )
    route = Route(instance="i", incarnation=1, seq=1, trajectory_id="t", group_id="g", min_version=3)
    instance.deliver(11.0, route)
    instance.replan()
    assert instance.next_event == 11.0
    instance.advance()
    assert instance.next_event == pytest.approx(11 + 0.04 + 3 * (0.03 + 0.1) + 0.001 * (4 + 5 + 6))
    instance.advance()
    report = instance.take_report(progress=False)
    assert [(t.trajectory_id, t.length, t.min_version, t.finish_reason) for t in report.finished] == [
        ("t", 7, 3, "stop")
    ]
    assert (report.acked_seq, report.kv_tokens, report.generated_tokens) == (1, 0, 3)
    assert instance.next_event is None


def test_a_slow_instance_takes_so_many_times_as_long_from_the_next_boundary_on() -> None:
    trajectory = SimulatedTrajectory("t", "g", prompt=1, target=11, truncated=False)
    instance = SimulatedInstance(
        instance="i",
        incarnation=1,
        version=0,
        costs=CostModel(k1=0, k2=1, k3=1, k4=0, prefill=0, pull=0),
        kv_capacity=100,
        max_running=4,
        on_pull="recompute",
        find={"t": trajectory}.get,
        newest=lambda: 0,
    )
    route = Route(instance="i", incarnation=1, seq=1, trajectory_id="t", group_id="g", min_version=0)
    instance.deliver(0.0, route)
    instance.slow_down(3.5, 2.0)
    while instance.next_event is not None:
        instance.advance()
    assert instance.at == pytest.approx(4 * 1 + 6 * 2)
