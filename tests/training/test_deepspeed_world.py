"""Calls on all ranks at once, and how they fail: with peers that do as they are told."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from typing import Any

import pytest

from staleflow.errors import RunFailed
from staleflow.training.deepspeed import world as module
from staleflow.training.deepspeed.peers import ProcessPeer, RankDied
from staleflow.training.deepspeed.world import World


class Scripted:
    """A peer that answers each call with what it was told: a value, an error, or nothing at all."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"join": None} | answers
        self.killed = False

    def ask(self, method: str, *arguments: Any, sending: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer != "silence":
            future.set_result(answer)
        return future

    def kill(self) -> None:
        self.killed = True


class Own:
    """Rank 0."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def join(self, *_: Any) -> None:
        """Nobody is met."""

    def work(self, amount: int = 0) -> int:
        if amount < 0:
            raise RunFailed("not so little")
        return amount


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        port = 1

    monkeypatch.setattr(module, "Rank", Own)
    monkeypatch.setattr(module, "open_meeting", lambda *_: Store())
    monkeypatch.setattr(module, "SETTLE_S", 0.1)


def world_of(*peers: Scripted, start_timeout_s: float = 5.0) -> World:
    return World(
        ranks=1 + len(peers),
        launch=lambda rank: peers[rank - 1],
        start_timeout_s=start_timeout_s,
        timeout_s=0.2,
    )


def test_a_call_answers_by_rank() -> None:
    assert world_of(Scripted(work=8), Scripted(work=9)).run("work", 7) == [7, 8, 9]


def test_a_rank_that_died_is_named_and_the_others_are_killed() -> None:
    peers = Scripted(work=8), Scripted(work=RankDied("gone"))
    world = world_of(*peers)
    with pytest.raises(RunFailed, match="the process of training rank 2 died at `work`"):
        world.run("work", 7)
    assert all(peer.killed for peer in peers)
    with pytest.raises(RunFailed, match="earlier failure"):
        world.run("work", 7)


def test_a_rank_that_is_silent_after_rank_0_is_done_is_given_up() -> None:
    with pytest.raises(RunFailed, match=r"training rank 1 did not finish `work` within 0\.2 s of rank 0"):
        world_of(Scripted(work="silence")).run("work", 7)


def test_a_call_with_a_time_limit_names_who_is_late() -> None:
    with pytest.raises(RunFailed, match=r"rank 1 did not finish `join` within the time limit of 0\.3 s"):
        world_of(Scripted(join="silence"), start_timeout_s=0.3)


def test_a_rank_that_fails_is_named_with_its_reason() -> None:
    with pytest.raises(RunFailed, match="training rank 1 failed at `work`: out of memory"):
        world_of(Scripted(work=RuntimeError("out of memory"))).run("work", 7)


def test_what_every_rank_refuses_breaks_nothing() -> None:
    peer = Scripted(work=RunFailed("not so little"))
    world = world_of(peer)
    with pytest.raises(RunFailed, match=r"^not so little$"):
        world.run("work", -1)
    peer.answers["work"] = 1
    assert world.run("work", 1) == [1, 1]
    assert not peer.killed


@pytest.mark.timeout(240)
def test_ctrl_c_leaves_a_rank_at_its_work() -> None:
    """F37: it reaches every process of the terminal, and the step is to be finished and saved."""
    peer = ProcessPeer(1)
    try:
        peer.ask("leave").result(200)  # it is up
        os.kill(peer.pid, signal.SIGINT)
        time.sleep(0.3)
        assert peer.ask("leave").result(30) is None
    finally:
        peer.kill()
