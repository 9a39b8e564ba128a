"""A push that runs behind the next step's passes: what that may change, and what it may not."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_inline_run import synchronous_reference, train_rows
from toy import ToyRun, toy_config

from staleflow.audit import audit_ledger
from staleflow.data.trajectory import TrainBatch
from staleflow.errors import TransportError
from staleflow.runtime.backends.inline import InlinePace
from staleflow.runtime.backends.ray.trainer_actor import TrainerActor
from staleflow.servers.memory import MemoryTransport
from staleflow.training.trainer import TrainResult, nothing

SLOW_PUSH = InlinePace(train_polls=2, push_polls=6)
"""A step is done long before the push of the one before."""


def watched(run: ToyRun) -> tuple[list[tuple[str, int]], dict[int, Any], dict[int, Any]]:
    """The order of steps and pushes; weights by version as the trainer made them, and as they were pushed."""
    backend: Any = run.loop._backend
    order: list[tuple[str, int]] = []
    made: dict[int, Any] = {}
    pushed: dict[int, Any] = {}
    train, push = backend._trainer.train, backend._publisher.push

    def copies(tensors: Any) -> dict[str, NDArray[Any]]:
        return {name: np.array(array) for name, array in tensors.items()}

    def watched_train(batch: TrainBatch, before_update: Any = nothing) -> TrainResult:
        order.append(("train", batch.step))
        result: TrainResult = train(batch, before_update)
        made[result.version] = copies(backend._trainer.weights())
        return result

    def watched_push(version: int, tensors: Any) -> None:
        order.append(("push", version))
        pushed[version] = copies(tensors)
        push(version, tensors)

    backend._trainer.train, backend._publisher.push = watched_train, watched_push
    return order, made, pushed


def test_every_version_is_pushed_whole_though_the_next_step_has_begun(model: Path, tmp_path: Path) -> None:
    config = toy_config(model, tmp_path, "staleness.bound=2", "run.steps=8", "checkpoint.every=2")
    run = ToyRun(config, tmp_path, pace=SLOW_PUSH)
    order, made, pushed = watched(run)
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).violations == ()
    # The overlap took place: a step began before the push of the weights that it started from.
    assert any(order.index(("train", v)) < order.index(("push", v)) for v in range(1, 8))
    assert [v for kind, v in order if kind == "push"] == list(range(9))
    for version, weights in made.items():
        for name, value in weights.items():
            np.testing.assert_array_equal(pushed[version][name], value, err_msg=f"{version} {name}")
    assert max(row["staleness/max"] for row in train_rows(run)) <= 2


def test_bound_zero_is_a_plain_synchronous_loop_to_the_bit_however_slow_pushes_are(
    model: Path, tmp_path: Path
) -> None:
    """F5."""
    config = toy_config(model, tmp_path, "staleness.bound=0", "checkpoint.every=0")
    expected, weights = synchronous_reference(config)
    run = ToyRun(config, tmp_path, pace=SLOW_PUSH)
    order, made, _ = watched(run)
    assert run.run() == "completed"
    assert [row["train/loss"] for row in train_rows(run)] == [r.metrics["train/loss"] for r in expected]
    for name, value in weights.items():
        np.testing.assert_array_equal(made[config.run.steps][name], value, err_msg=name)
    # Nothing of step s can be generated before the push of s: so nothing overlaps.
    assert all(order.index(("push", s)) < order.index(("train", s)) for s in range(1, config.run.steps))


def test_the_journal_says_how_long_pushes_took_and_a_checkpoint_is_of_the_trained_version(
    model: Path, tmp_path: Path
) -> None:
    config = toy_config(model, tmp_path, "staleness.bound=1", "run.steps=3", "checkpoint.every=1")
    run = ToyRun(config, tmp_path, pace=SLOW_PUSH)
    run.run()
    lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
    assert [(line["v"], line["s"]) for line in lines if line["k"] == "push"] == [(v, 0.0) for v in range(4)]
    assert [line["v"] for line in lines if line["k"] == "save"] == [1, 2, 3]
    assert {"timing_s/push", "timing_s/push_behind"} <= train_rows(run)[0].keys()


def test_a_push_that_fails_ends_the_run(model: Path, tmp_path: Path) -> None:
    run = ToyRun(toy_config(model, tmp_path, "staleness.bound=1"), tmp_path, pace=SLOW_PUSH)
    backend: Any = run.loop._backend
    push = backend._publisher.push

    def full(version: int, tensors: Any) -> None:
        if version == 2:
            raise TransportError("no room")
        push(version, tensors)

    backend._publisher.push = full
    with pytest.raises(TransportError, match="no room"):
        run.run()


# ---------------------------------------------------------------------- the actor, without Ray


class SlowTransport(MemoryTransport):
    """Pushes from version 1 on wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.error = threading.Event(), ""

    def push(self, version: int, tensors: Any) -> None:
        if version:
            assert self.go.wait(30)
            if self.error:
                raise TransportError(self.error)
        super().push(version, tensors)


class CountingTrainer:
    """Its one weight is its version; notes when an update waits."""

    def __init__(self) -> None:
        self.version = 0
        self._weight = np.zeros(1, dtype=np.float32)
        self.waiting = threading.Event()

    def train(self, batch: TrainBatch, before_update: Any = nothing) -> TrainResult:
        self.waiting.set()
        before_update()
        self.version += 1
        self._weight += 1
        return TrainResult(version_start=batch.step, version=self.version, trained=(), metrics={})

    def weights(self) -> dict[str, NDArray[Any]]:
        return {"w": self._weight}

    def close(self) -> None:
        """Nothing."""


@pytest.fixture
def parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[TrainerActor, CountingTrainer, SlowTransport]:
    trainer, transport = CountingTrainer(), SlowTransport()
    monkeypatch.setattr("staleflow.runtime.backends.ray.trainer_actor.log_to", lambda *_: None)
    actor = TrainerActor(lambda **_: trainer, transport, tmp_path, tmp_path, keep=1)
    assert actor.start(hold=False).version == 0
    return actor, trainer, transport


def test_a_step_ends_before_its_push_and_the_next_update_waits_for_it(
    parts: tuple[TrainerActor, CountingTrainer, SlowTransport],
) -> None:
    actor, trainer, transport = parts
    first = actor.train(TrainBatch(step=0, groups=()), hold=True)
    assert (first.step, transport.newest()) == (0, 0)
    trainer.waiting.clear()
    second: list[Any] = []
    step = threading.Thread(target=lambda: second.append(actor.train(TrainBatch(step=1, groups=()), False)))
    step.start()
    assert trainer.waiting.wait(30)  # its passes are over
    assert trainer.version == 1  # and its update is not
    transport.go.set()
    step.join(30)
    assert actor.pushed(1).version == 1
    assert actor.pushed(2).version == 2
    with transport.subscriber().lease(1) as lease:  # held
        assert lease.tensors["w"].tolist() == [1.0]
    assert second[0].waited_s > 0
    assert second[0].update_s < second[0].waited_s + 1.0


def test_a_push_that_failed_fails_its_message_and_the_next_step(
    parts: tuple[TrainerActor, CountingTrainer, SlowTransport],
) -> None:
    actor, trainer, transport = parts
    transport.error = "no room"
    transport.go.set()
    actor.train(TrainBatch(step=0, groups=()), hold=False)
    with pytest.raises(TransportError, match="no room"):
        actor.pushed(1)
    with pytest.raises(TransportError, match="no room"):
        actor.train(TrainBatch(step=1, groups=()), hold=False)
    assert trainer.version == 1
