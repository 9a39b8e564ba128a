"""Ranks of a trainer as Ray actors, which the trainer's actor creates and which end with it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from staleflow.errors import RunFailed
from staleflow.runtime.backends.ray.placement import Placement
from staleflow.training.deepspeed.peers import Launch, RankDied


class RankActor:
    """A process with one rank. `send` runs on a separate thread."""

    def __init__(self, rank: int, logs: Path) -> None:
        from staleflow.runtime.backends.ray.actors import log_to
        from staleflow.training.deepspeed.rank import Rank

        log_to(logs, f"trainer-rank-{rank}")
        self._rank = Rank(rank)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the rank."""
        try:
            return getattr(self._rank, method)(*arguments)
        except RunFailed:
            raise
        except Exception as error:
            raise RunFailed(f"{type(error).__name__}: {error}") from error

    def send(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Like `call`, while another call is under way."""
        return self.call(method, arguments)


class RayPeer:
    """A `Peer` in a Ray actor."""

    def __init__(self, rank: int, options: dict[str, Any], logs: Path) -> None:
        asked: dict[str, Any] = {**options, "max_restarts": 0, "concurrency_groups": {"send": 1}}
        make: Any = ray.remote(**asked)(RankActor)
        self._rank = rank
        self._actor = make.remote(rank, logs)

    def ask(self, method: str, *arguments: Any, sending: bool = False) -> Future[Any]:
        """See `Peer`."""
        if sending:
            reference = self._actor.send.options(concurrency_group="send").remote(method, arguments)
        else:
            reference = self._actor.call.remote(method, arguments)
        answer: Future[Any] = Future()

        def finished(found: Future[Any]) -> None:
            error = found.exception()
            if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
                answer.set_exception(error.cause)
            elif isinstance(error, RayActorError):
                answer.set_exception(RankDied(f"the process of training rank {self._rank} died"))
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found.result())

        reference.future().add_done_callback(finished)
        return answer

    def kill(self) -> None:
        """See `Peer`."""
        ray.kill(self._actor)


def ray_launch(placement: Placement, logs: Path) -> Launch:
    """Starts rank n in bundle n of training."""

    def launch(rank: int) -> RayPeer:
        return RayPeer(rank, placement.options("training", rank), logs)

    return launch


def own_host() -> str:
    """This node's address as other nodes see it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
