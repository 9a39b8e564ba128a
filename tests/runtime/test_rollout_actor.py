"""What a rollout actor does between deliveries and its instance. Its process is in `tests/faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import toy_config

from staleflow.coordination.actions import Abort, Command, Pull
from staleflow.errors import TransportError
from staleflow.runtime.backends.ray import actors
from staleflow.runtime.backends.ray.actors import TRANSFER_WAIT_S, RolloutActor


class Busy:
    """An instance that decodes."""

    is_idle = False
    has_news = False


class Weights:
    """Of a node to which they are on their way."""

    def __init__(self) -> None:
        self.version: int | None = 0
        self.gone = False

    def newest(self) -> int | None:
        if self.gone:
            raise TransportError("gone")
        return self.version


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def actor(model: Path, tmp_path: Path, weights: Weights) -> RolloutActor:
    nothing: Any = None
    actor = RolloutActor(toy_config(model, tmp_path), nothing, "i0", 1, nothing, tmp_path / "none")
    actor._newest = weights.newest
    return actor


def deliver(actor: RolloutActor, *commands: Command) -> None:
    actor.deliver(commands, {})


def taken(actor: RolloutActor) -> list[Command]:
    instance: Any = Busy()
    return [command for commands, _ in actor._take_inbox(instance) for command in commands]


PULL = Pull(instance="i0", incarnation=1, seq=1, version=1)
ABORT = Abort(instance="i0", incarnation=1, seq=2, trajectory_id="t")


def test_a_pull_of_what_is_on_its_way_waits_with_what_follows_and_keeps_its_place(
    actor: RolloutActor, weights: Weights
) -> None:
    deliver(actor, PULL)
    deliver(actor, ABORT)
    assert taken(actor) == []
    weights.version = 1
    assert taken(actor) == [PULL, ABORT]


def test_commands_without_a_pull_and_pulls_of_what_is_here_do_not_wait(
    actor: RolloutActor, weights: Weights
) -> None:
    deliver(actor, ABORT)
    assert taken(actor) == [ABORT]
    weights.version = 3
    deliver(actor, PULL)
    assert taken(actor) == [PULL]


def test_weights_that_do_not_come_are_not_waited_for_without_end(
    actor: RolloutActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F36: the pull is then refused by the instance, and ordered again."""
    now = [100.0]
    monkeypatch.setattr(actors.time, "monotonic", lambda: now[0])
    deliver(actor, PULL)
    assert taken(actor) == []
    now[0] += TRANSFER_WAIT_S + 1
    assert taken(actor) == [PULL]


def test_where_the_store_is_gone_the_pull_finds_out(actor: RolloutActor, weights: Weights) -> None:
    weights.gone = True
    deliver(actor, PULL)
    assert taken(actor) == [PULL]
