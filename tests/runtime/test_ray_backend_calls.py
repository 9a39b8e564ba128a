"""The Ray back end's bookkeeping of calls, with a Ray that does only what the test says.

`tests/faults/test_ray_run.py` has the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from toy import opening, toy_config

from staleflow.coordination.events import InstanceJoined
from staleflow.errors import ConfigError
from staleflow.runtime.assembly import instance_names, part_builders
from staleflow.runtime.backend import InstanceDown, Message, PartFailed, RewardsReady, TrainerUp
from staleflow.runtime.backends.ray import backend as ray_backend
from staleflow.runtime.backends.ray import calls as ray_calls
from staleflow.runtime.backends.ray.backend import RayBackend
from staleflow.runtime.backends.ray.placement import Placement
from staleflow.runtime.clock import VirtualClock
from staleflow.runtime.start import first_start


class Call:
    """A call under way; `answer` or `error` ends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.result: Any = None

    def ends(self, result: Any = None) -> None:
        self.done, self.result = True, result


class Method:
    def __init__(self, ray: FakeRay, name: str) -> None:
        self._ray, self._name = ray, name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *_: Any) -> Call:
        self._ray.calls.append(Call(self._name))
        return self._ray.calls[-1]


class Actor:
    def __init__(self, ray: FakeRay, name: str) -> None:
        self._ray, self.name = ray, name

    def __getattr__(self, method: str) -> Method:
        return Method(self._ray, f"{self.name}.{method}")


class FakeRay:
    """Stands in for the module `ray`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.killed: list[Actor] = []

    def remote(self, **_: Any) -> Callable[[type], Any]:
        ray = self

        class Maker:
            def __init__(self, cls: type) -> None:
                self._name = cls.__name__

            def remote(self, *_: Any, **__: Any) -> Actor:
                return Actor(ray, self._name)

        return Maker

    def wait(self, calls: list[Call], **_: Any) -> tuple[list[Call], list[Call]]:
        return [c for c in calls if c.done], [c for c in calls if not c.done]

    def get(self, call: Call, timeout: float) -> Any:
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def last(self, name: str) -> Call:
        return next(c for c in reversed(self.calls) if c.name == name)

    def count(self, name: str) -> int:
        return sum(c.name == name for c in self.calls)


class Stage:
    """A backend on a fake Ray and a virtual clock."""

    def __init__(
        self, model: Path, folder: Path, ray: FakeRay, *overrides: str, placement: Placement | None = None
    ) -> None:
        self.ray, self.clock = ray, VirtualClock()
        config = toy_config(model, folder, "rollout.instances=1", "cluster.start_timeout_s=100", *overrides)
        self.backend = RayBackend(
            config,
            part_builders(config, first_start(opening(config))),
            instances=instance_names(config),
            run_name="toy",
            checkpoints=folder,
            logs=folder,
            clock=self.clock,
            placement=placement,
        )
        self.backend.start()

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Time passes, and who gives signs of life gives one, if it was not silenced."""
        self.clock.sleep(seconds)
        return list(self.backend.poll(0.0))

    def signs_of_life(self, *parts: str) -> None:
        for name in parts:
            self.ray.last(name).ends(RewardsReady(()) if "Reward" in name else None)

    def until_trainer_is_up(self) -> None:
        self.ray.last("ParameterServerActor.start").ends("a handle")
        self.poll()
        self.ray.last("TrainerActor.start").ends(TrainerUp(version=0, push_s=0.0))
        self.poll()


REWARDS, STORAGE = "RewardActor.answers", "ParameterServerActor.live"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (ray_backend, ray_calls):
        monkeypatch.setattr(module, "ray", fake)
    return fake


@pytest.fixture
def stage(model: Path, tmp_path: Path, fake: FakeRay) -> Stage:
    return Stage(model, tmp_path, fake)


def test_an_instance_that_hangs_in_its_start_is_started_again(stage: Stage) -> None:
    """F16: the others are up, so nobody else would notice; with one instance the run would hang."""
    stage.until_trainer_is_up()
    for second in (50, 49):
        assert stage.poll(second) == []
        stage.signs_of_life(REWARDS, STORAGE)
        stage.poll()
    (down,) = stage.poll(2)
    assert down == InstanceDown(instance="i0", incarnation=1, reason="no answer for 100 s")
    assert stage.ray.count("RolloutActor.start") == 2
    up = InstanceJoined(instance="i0", incarnation=2, version=0, kv_capacity=10, max_running=1)
    stage.ray.last("RolloutActor.start").ends(up)
    assert stage.poll() == [up]


def test_an_instance_that_stops_answering_is_started_again_and_in_the_end_given_up(stage: Stage) -> None:
    """The first incarnation and three restarts; then nobody is left and the run fails."""
    stage.until_trainer_is_up()
    messages: list[Message] = []
    for incarnation in (1, 2, 3, 4):
        up = InstanceJoined(instance="i0", incarnation=incarnation, version=0, kv_capacity=10, max_running=1)
        stage.ray.last("RolloutActor.start").ends(up)
        stage.poll()
        for second in (40, 21, 2):
            stage.signs_of_life(REWARDS, STORAGE)
            messages += stage.poll(second)
    reason = "no answer for 62 s"
    downs = [InstanceDown(instance="i0", incarnation=n, reason=reason) for n in (1, 2, 3, 4)]
    assert messages == [*downs, PartFailed(part="every rollout instance", reason=reason)]
    assert stage.ray.count("RolloutActor.start") == 4


@pytest.mark.parametrize(
    ("silent", "other", "part"),
    [(REWARDS, STORAGE, "the rewards"), (STORAGE, REWARDS, "the parameter server")],
)
def test_rewards_or_parameter_server_without_a_sign_of_life_fail_the_run(
    silent: str, other: str, part: str, stage: Stage
) -> None:
    """F16: a stopped process would otherwise be waited for without end."""
    stage.until_trainer_is_up()
    stage.signs_of_life(REWARDS, STORAGE)
    assert stage.poll() == []
    stage.signs_of_life(other)
    assert stage.poll(59) == []
    stage.signs_of_life(other)
    assert stage.poll(2) == [PartFailed(part=part, reason="no answer for 60 s")]


def test_starting_never_blocks_on_a_parameter_server_that_does_not_come(stage: Stage) -> None:
    assert stage.poll(10) == []
    assert stage.ray.count("TrainerActor.start") == 0


def test_what_a_constructor_raised_is_told(stage: Stage) -> None:
    death = ActorDiedError()
    death._actor_init_failed = True
    death.error_msg = f"The actor died because of an error raised in its creation task\n{ConfigError('no')!r}"
    stage.ray.last(REWARDS).ends(death)
    (failed,) = stage.poll()
    assert isinstance(failed, PartFailed)
    assert failed.reason == "ConfigError('no')"


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_parts_that_share_a_gpu_start_one_after_the_other(
    share: float, model: Path, tmp_path: Path, fake: FakeRay
) -> None:
    """And one that never comes up holds up the next no longer than its restarts take."""
    placement = Placement(shares={"evaluation": {"GPU": share}, "rollout": {"GPU": share}})
    stage = Stage(model, tmp_path, fake, "evaluation.every=1", "rollout.instances=3", placement=placement)
    parts = ("EvaluatorActor.start", "TrainerActor.start", "RolloutActor.start")

    def ends(name: str, result: Any) -> list[int]:
        """How many starts of each kind there have been when this one is over."""
        fake.last(name).ends(result)
        stage.poll()
        return [fake.count(part) for part in parts]

    up = InstanceJoined(instance="i", incarnation=1, version=0, kv_capacity=10, max_running=1)
    started = [
        ends("ParameterServerActor.start", "a handle"),
        ends("EvaluatorActor.start", None),
        ends("TrainerActor.start", TrainerUp(version=0, push_s=0.0)),
        ends("RolloutActor.start", up),
        *(ends("RolloutActor.start", ActorDiedError()) for _ in range(4)),
    ]
    if share == 1.0:
        assert started[:4] == [[1, 1, 0], [1, 1, 0], [1, 1, 3], [1, 1, 3]]
    else:
        assert [s for s in started if s[0] == 1] == [
            [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 1, 4], [1, 1, 5], [1, 1, 6]
        ]  # fmt: skip
        assert stage.backend._to_start == deque()


def test_an_evaluation_that_hangs_in_its_start_fails_the_run(
    model: Path, tmp_path: Path, fake: FakeRay
) -> None:
    """F16: its version would be waited for at the end of the run."""
    stage = Stage(model, tmp_path, fake, "evaluation.every=1")
    stage.until_trainer_is_up()
    for second in (50, 49):
        stage.signs_of_life(REWARDS, STORAGE)
        assert stage.poll(second) == []
    stage.ray.last("RolloutActor.start").ends(ActorDiedError())
    stage.signs_of_life(REWARDS, STORAGE)
    messages = stage.poll(2)
    assert PartFailed(part="the evaluation", reason="no answer for 100 s") in messages
