"""The rollout instance: commands in, reports out, and the owner's copy always whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.events import Rejection
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import EngineError, ProtocolError, TransportError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine, FakeScript
from staleflow.rollout.instance import RolloutInstance
from staleflow.rollout.scripted_lengths import fixed

Build = Callable[..., Any]


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Lease:
    """Weights as the parameter server would lease them."""

    version: int
    tensors: Mapping[str, np.ndarray]


@dataclass
class Weights:
    """A parameter server in a variable. `broken`: every lease fails."""

    newest_version: int | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    broken: bool = False

    def newest(self) -> int | None:
        return self.newest_version

    @contextmanager
    def lease(self, version: int | None = None) -> Iterator[Lease]:
        if self.broken or self.newest_version is None:
            raise TransportError("no weights to be had")
        yield Lease(self.newest_version, self.tensors)


class World:
    """One instance and the owner of its trajectories, who knows only what reports tell."""

    def __init__(
        self, engine: Any, weights: Weights | None = None, interval: float = 1e9, **limits: float
    ) -> None:
        self.clock = Clock()
        self.weights = weights or Weights()
        self.engine = engine
        self.instance = RolloutInstance(
            instance="i0",
            incarnation=1,
            engine=engine,
            subscriber=self.weights,
            on_pull="recompute",
            clock=self.clock,
            progress_interval_s=interval,
            **limits,
        )
        self.seq = 0
        self.owned: dict[str, Trajectory] = {}

    def named(self) -> dict[str, Any]:
        self.seq += 1
        return {"instance": "i0", "incarnation": 1, "seq": self.seq}

    def route(self, t: Trajectory, min_version: int = 0) -> Route:
        self.owned[t.trajectory_id] = t
        return Route(
            **self.named(), trajectory_id=t.trajectory_id, group_id=t.group_id, min_version=min_version
        )

    def apply(self, *commands: Command) -> None:
        self.instance.apply(commands, self.owned)

    def report(self) -> InstanceUpdate:
        update = self.instance.take_report()
        for delta in update.deltas:
            t = self.owned[delta.trajectory_id].extended(delta.segment)
            self.owned[delta.trajectory_id] = t.finished(delta.finish_reason)
        return update


def state(world: World) -> tuple[bool, bool]:
    """(idle, has news)."""
    return world.instance.is_idle, world.instance.has_news


@pytest.fixture
def world(new_fake: Build) -> World:
    return World(new_fake())


def test_a_routed_trajectory_runs_and_is_reported_whole(world: World, new_trajectory: Build) -> None:
    world.apply(world.route(new_trajectory("t", 5)))
    assert state(world) == (False, True)
    for _ in range(8):
        world.instance.advance()
    assert state(world) == (True, True)
    report = world.report().report
    (finished,) = report.finished
    assert (finished.trajectory_id, finished.length, finished.min_version) == ("t", 13, 0)
    assert finished.finish_reason == "stop"
    assert (report.acked_seq, report.revision, report.generated_tokens) == (1, 1, 8)
    assert (report.running, report.waiting, report.kv_tokens, report.kv_capacity) == (0, 0, 0, 1 << 20)
    assert world.owned["t"].response_len == 8
    assert world.owned["t"].finish_reason is FinishReason.STOP
    assert state(world) == (True, False)


def test_each_command_takes_effect_once_and_in_order(world: World, new_trajectory: Build) -> None:
    first, second = world.route(new_trajectory("a")), world.route(new_trajectory("b"))
    world.apply(first, second)
    world.instance.advance()
    world.apply(first, second)  # sent again, because the acknowledgement got lost
    interrupt = Interrupt(**world.named(), trajectory_id="a")
    world.apply(second, interrupt, interrupt)
    report = world.report().report
    assert report.rejections == ()
    assert [t.trajectory_id for t in report.interrupted] == ["a"]
    assert report.acked_seq == 3


def test_a_gap_raises_and_applies_nothing(world: World, new_trajectory: Build) -> None:
    first = world.route(new_trajectory("a"))
    world.named()
    third = world.route(new_trajectory("b"))
    with pytest.raises(ProtocolError, match="i0 expected command 2, got 3"):
        world.apply(first, third)
    assert world.engine.trajectories() == {}
    assert world.instance.take_report().report.acked_seq == 0


def test_commands_for_another_incarnation_are_void(world: World, new_trajectory: Build) -> None:
    t = new_trajectory("t")
    old = Route(instance="i0", incarnation=0, seq=1, trajectory_id="t", group_id=t.group_id, min_version=0)
    world.instance.apply([old], {"t": t})
    assert world.engine.trajectories() == {}
    assert world.instance.take_report().report.acked_seq == 0
    with pytest.raises(ProtocolError, match="i0 received a command for i1"):
        world.instance.apply([Pull(instance="i1", incarnation=1, seq=1, version=0)], {})


def test_a_route_needs_its_min_version_and_room(new_fake: Build, new_trajectory: Build) -> None:
    world = World(new_fake(version=2, kv_capacity_tokens=10))
    world.apply(
        world.route(new_trajectory("young"), min_version=3),
        world.route(new_trajectory("long", 11), min_version=2),
        world.route(new_trajectory("fine"), min_version=2),
    )
    report = world.report().report
    assert [(r.seq, r.trajectory_id) for r in report.rejections] == [(1, "young"), (2, "long")]
    assert report.rejections[0].reason == "version 2 is older than 3"
    assert "cannot gain one more" in report.rejections[1].reason
    assert report.acked_seq == 3
    assert list(world.engine.trajectories()) == ["fine"]
    world.instance.apply([Route(**world.named(), trajectory_id="ghost", group_id="g", min_version=0)], {})
    assert [r.trajectory_id for r in world.report().report.rejections] == ["ghost"]


def test_an_interrupt_or_abort_of_one_that_has_finished_is_only_acknowledged(
    world: World, new_trajectory: Build
) -> None:
    world.apply(world.route(new_trajectory("t")))
    for _ in range(8):
        world.instance.advance()
    world.apply(Interrupt(**world.named(), trajectory_id="t"), Abort(**world.named(), trajectory_id="t"))
    report = world.report().report
    assert (report.acked_seq, report.interrupted, report.aborted) == (3, (), ())
    assert [t.trajectory_id for t in report.finished] == ["t"]


def test_aborted_tokens_are_reported_so_that_none_goes_uncounted(world: World, new_trajectory: Build) -> None:
    world.apply(world.route(new_trajectory("t")))
    for _ in range(3):
        world.instance.advance()
    world.apply(Abort(**world.named(), trajectory_id="t"))
    update = world.report()
    assert update.report.aborted == ("t",)
    assert [(d.trajectory_id, len(d.segment.tokens), d.finish_reason) for d in update.deltas] == [
        ("t", 3, None)
    ]


@pytest.mark.parametrize("k", [0, 1, 7])
def test_interrupted_and_routed_back_the_owners_copy_stays_aligned(
    k: int, new_fake: Build, new_trajectory: Build
) -> None:
    """F8, over progress reports, an interruption after k tokens and a resume."""
    world = World(new_fake(), interval=2.0)
    world.apply(world.route(new_trajectory("t")))
    for _ in range(k):
        world.instance.advance()
        world.clock.spend(1.0)
        world.report()
    world.apply(Interrupt(**world.named(), trajectory_id="t"))
    (left,) = world.report().report.interrupted
    assert (left.length, left.min_version) == (5 + k, 0 if k else None)
    half = world.owned["t"]
    assert half.response_len == k
    world.apply(world.route(half))
    for _ in range(8 - k):
        world.instance.advance()
        world.clock.spend(1.0)
        world.report()
    whole = new_fake()
    whole.add(new_trajectory("t"))
    expected = next(t for _ in range(8) for t in whole.step())
    for name in ("tokens", "log_probs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(world.owned["t"], name), getattr(expected, name))


def test_progress_is_reported_at_its_interval_and_only_what_grew(
    new_fake: Build, new_trajectory: Build
) -> None:
    engine = new_fake(max_running=1)
    world = World(engine, interval=10.0)
    world.apply(world.route(new_trajectory("a", 5)), world.route(new_trajectory("b", 5)))
    world.report()
    for _ in range(2):
        world.instance.advance()
    assert state(world) == (False, False)
    assert world.report().deltas == ()
    world.clock.spend(10.0)
    assert state(world) == (False, True)
    update = world.report()
    assert update.report.lengths == (("a", 7),)
    assert [(d.trajectory_id, len(d.segment.tokens)) for d in update.deltas] == [("a", 2)]
    assert world.report().deltas == ()
    assert world.owned["a"].response_len == 2


def test_a_pull_loads_the_newest_and_is_timed(new_fake: Build, new_trajectory: Build) -> None:
    world = World(new_fake(), Weights(newest_version=5))
    world.engine.load_weights = _timed(world, world.engine.load_weights)
    world.apply(Pull(**world.named(), version=3))
    report = world.report().report
    assert (report.version, report.rejections, report.acked_seq) == (5, (), 1)
    assert report.pull_seconds == 2.0
    world.apply(Pull(**world.named(), version=5))  # there already: nothing to load
    assert world.report().report.pull_seconds == 2.0


def _timed(world: World, load: Callable[..., None]) -> Callable[..., None]:
    def loads(*arguments: Any) -> None:
        world.clock.spend(2.0)
        load(*arguments)

    return loads


def test_a_failed_pull_keeps_the_old_version_and_no_route_sneaks_under_the_new_one(
    new_fake: Build, new_trajectory: Build
) -> None:
    """F36: a pull that breaks, one that is refused, and one that finds too old weights."""
    world = World(new_fake(script=FakeScript(refuse_loads=1)), Weights(newest_version=1, broken=True))
    world.apply(Pull(**world.named(), version=1), world.route(new_trajectory("t"), min_version=1))
    report = world.report().report
    assert report.version == 0
    assert report.rejections == (
        Rejection(seq=1, trajectory_id=None, reason="no weights to be had"),
        Rejection(seq=2, trajectory_id="t", reason="version 0 is older than 1", stale_version=True),
    )
    world.weights.broken = False
    world.apply(Pull(**world.named(), version=1))
    assert world.report().report.rejections[0].reason == "scripted refusal of weight version 1"
    world.apply(Pull(**world.named(), version=2))
    assert world.report().report.rejections[0].reason == "the newest available version is 1, not 2"
    world.apply(Pull(**world.named(), version=1), world.route(new_trajectory("t"), min_version=1))
    assert world.report().report.version == 1
    assert list(world.engine.trajectories()) == ["t"]


@pytest.mark.parametrize(("broken", "limit_s"), [(True, 60), (False, 300)])
def test_weights_that_are_long_on_their_way_are_no_failure_of_the_instance(
    broken: bool, limit_s: int, new_fake: Build
) -> None:
    """A large model takes minutes to a far node. A pull that breaks is another matter."""
    world = World(new_fake(), Weights(newest_version=0, broken=broken), transfer_limit_s=300.0)
    for _ in range(2):
        world.apply(Pull(**world.named(), version=1))
        world.clock.spend(limit_s)
    world.clock.spend(1)
    with pytest.raises(EngineError, match=f"could not pull for {limit_s} s"):
        world.apply(Pull(**world.named(), version=1))


def test_a_pull_disturbs_nothing_in_flight_here_or_elsewhere(
    new_model: Build, new_engine: Build, new_trajectory: Build
) -> None:
    """F11, with the torch engine: 16 in flight on A, 16 on B, and A pulls."""
    new = {n: t.detach().numpy() for n, t in new_model("llama", 1).state_dict().items()}
    a = World(new_engine(sampling=SamplingParams()), Weights(newest_version=1, tensors=new))
    b = World(new_engine(sampling=SamplingParams()))
    for world in (a, b):
        world.apply(*(world.route(new_trajectory(f"t{i}", 1 + i % 5, max_new_tokens=6)) for i in range(16)))
        for _ in range(3):
            world.instance.advance()
    a.apply(Pull(**a.named(), version=1))
    for world in (a, b):
        report = world.report().report
        assert (report.running, report.interrupted, report.aborted, report.rejections) == (16, (), (), ())
        for _ in range(3):
            world.instance.advance()
        assert len(world.report().report.finished) == 16
    assert all(t.versions.tolist() == [0, 0, 0, 1, 1, 1] for t in a.owned.values())
    assert all(t.versions.tolist() == [0] * 6 for t in b.owned.values())
    assert all(a.owned[n].tokens.tolist()[:3] == b.owned[n].tokens.tolist()[:3] for n in a.owned)


def test_an_engine_failure_propagates_as_an_engine_error(new_fake: Build, new_trajectory: Build) -> None:
    """F16: whatever the engine raises, the runtime sees one type and takes the instance as lost."""
    world = World(new_fake(script=FakeScript(fail_at_step=1)))
    world.apply(world.route(new_trajectory("t")))
    with pytest.raises(EngineError, match="scripted failure at step 1"):
        world.instance.advance()

    class Broken(FakeEngine):
        def step(self) -> Any:
            raise ValueError("out of cheese")

    world = World(Broken(sampling=SamplingParams(), seed=0))
    world.apply(world.route(new_trajectory("t")))
    with pytest.raises(EngineError, match="out of cheese"):
        world.instance.advance()


def test_a_swap_that_breaks_half_way_is_an_engine_error_not_a_refusal(new_fake: Build) -> None:
    class Half(FakeEngine):
        def load_weights(self, tensors: Any, version: int, on_pull: Any) -> None:
            super().load_weights(tensors, version, on_pull)
            raise EngineError("the KV could not be rebuilt")

    world = World(Half(sampling=SamplingParams(), seed=0), Weights(newest_version=1))
    with pytest.raises(EngineError, match="could not be rebuilt"):
        world.apply(Pull(**world.named(), version=1))


def test_busy_time_is_time_spent_decoding(new_fake: Build, new_trajectory: Build) -> None:
    world = World(new_fake(seconds_per_step=0.5, lengths=fixed(3)))
    world.engine._spend = world.clock.spend
    world.instance.advance()
    world.apply(world.route(new_trajectory("t")))
    for _ in range(5):
        world.instance.advance()
        world.clock.spend(10.0)
    report = world.report().report
    assert report.busy_seconds == 1.5
    assert (report.decode_steps, report.running_steps, report.kv_token_steps) == (3, 3, 5 + 6 + 7)
    assert report.prefilled_tokens == 5


def test_a_trajectory_without_budget_costs_no_decoding_time(new_fake: Build, new_trajectory: Build) -> None:
    world = World(new_fake(seconds_per_step=0.5))
    world.engine._spend = world.clock.spend
    world.apply(world.route(new_trajectory("t", max_new_tokens=0)))
    world.instance.advance()
    report = world.report().report
    assert [t.trajectory_id for t in report.finished] == ["t"]
    assert (report.busy_seconds, report.decode_steps) == (0.0, 0)


def test_the_time_of_each_kind_of_command_is_reported(new_fake: Build, new_trajectory: Build) -> None:
    class Slow(FakeEngine):
        """Takes 1 s to add, 2 s to interrupt, 4 s to abort."""

        def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
            world.clock.spend(1.0)
            super().add(trajectory, greedy=greedy)

        def interrupt(self, trajectory_ids: Any) -> Any:
            world.clock.spend(2.0)
            return super().interrupt(trajectory_ids)

        def abort(self, trajectory_ids: Any) -> Any:
            world.clock.spend(2.0)
            return super().abort(trajectory_ids)

    costs = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=0.0, prefill=0.5, pull=8.0)
    weights = Weights()
    world = World(Slow(sampling=SamplingParams(), seed=0, seconds_per_step=costs), weights)
    world.engine._spend = world.clock.spend
    for name in ("a", "b", "c"):
        world.apply(world.route(new_trajectory(name, 5)))
    world.instance.advance()
    world.apply(Pull(**world.named(), version=1))  # refused: nothing was pushed yet
    weights.newest_version = 1
    world.apply(Pull(**world.named(), version=1))  # 18 tokens are rebuilt
    world.apply(Interrupt(**world.named(), trajectory_id="a", length=6, reason=""))
    world.apply(Abort(**world.named(), trajectory_id="b", length=6, reason=""))
    report = world.report().report
    assert (report.route_seconds, report.interrupt_seconds, report.abort_seconds) == (3.0, 2.0, 4.0)
    assert (report.pulls, report.rebuilt_tokens, report.pull_seconds) == (1, 18, 8.0 + 9.0)
    assert report.busy_seconds == 7.5


def test_a_second_turn_goes_on_from_given_tokens(world: World, new_trajectory: Build) -> None:
    world.apply(world.route(new_trajectory("t", max_new_tokens=100)))
    for _ in range(8):
        world.instance.advance()
    world.report()
    second = world.owned["t"].extended(Segment.given([4, 4])).finished(None)
    world.apply(world.route(second))
    for _ in range(8):
        world.instance.advance()
    world.report()
    assert world.owned["t"].loss_mask.tolist() == [True] * 8 + [False] * 2 + [True] * 8


class Swallowing(FakeEngine):
    """Never returns what it has finished."""

    def step(self) -> list[Trajectory]:
        super().step()
        return []


def test_an_instance_whose_last_trajectory_got_lost_reports_that_it_is_idle(new_trajectory: Build) -> None:
    """Else its owner believes for ever that the trajectory is there: nothing but a report says otherwise."""
    sampling = SamplingParams(max_model_len=100)
    engine = Swallowing(sampling=sampling, seed=0, kv_capacity_tokens=100, max_running=1, lengths=fixed(2))
    world = World(engine)
    world.apply(world.route(new_trajectory("a"), min_version=-1))
    assert world.report().report.waiting == 1
    world.instance.advance()
    assert state(world) == (False, False)
    world.instance.advance()
    assert state(world) == (True, True)
    assert world.report().report.waiting == 0
    assert state(world) == (True, False)
