"""The Ray back end: every part an actor, orders are calls, messages are finished calls.

Flow: for each instance one call is always under way, first `start`, then `updates`, which returns when the
instance has news (not more often than every coordination interval) or after a while as a sign of life. A call
that does not return in time, or ends with an error, means that the instance is lost: its actor is killed and
a new incarnation started. Rewards and parameter server give signs of life likewise, and the run fails when
they do not. A training step, a checkpoint and an evaluation may take as long as they like.

Invariant: no call blocks the loop but `poll`, and that for no longer than it was told.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from staleflow.config.schema import Config
from staleflow.coordination.commands import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.errors import StaleflowError, UserError
from staleflow.runtime.actors import (
    EvaluatorActor,
    ParameterServerActor,
    RewardActor,
    RolloutActor,
    TrainerActor,
)
from staleflow.runtime.assembly import instance_names
from staleflow.runtime.backend import InstanceDown, InstanceUpdated, Message, PartFailed, Scored
from staleflow.runtime.clock import Clock
from staleflow.runtime.start import StartPoint
from staleflow.servers.transport import Handle

ANSWER_WAIT_S = 2.0
"""How long a part may stay silent before it gives a sign of life."""
SILENT_LIMIT_S = 60.0
"""Without a sign of life from the rewards or the parameter server for this long, they are taken for dead."""
MAX_RESTARTS = 3
"""Restarts of one instance; then it stays down."""
CLOSE_WAIT_S = 5.0
"""How long a part may take to end in good order before its process is killed."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """A call under way. `on_result` and `on_error` return the messages it turns into."""

    part: str
    on_result: Callable[[Any], list[Message]]
    on_error: Callable[[str, bool], list[Message]]
    due: float = math.inf
    late: str = ""
    """The error when there is no result by then."""


class RayBackend:
    """See the module. Lives in the actor that runs the loop; every other actor is its child."""

    def __init__(
        self, config: Config, start: StartPoint, *, run_name: str, checkpoints: Path, logs: Path, clock: Clock
    ) -> None:
        self._config = config
        self._start_point = start
        self._run_name = run_name
        self._checkpoints = checkpoints
        self._logs = logs
        self._clock = clock
        self._calls: dict[Any, _Call] = {}
        self._instances: dict[str, Any] = {}
        self._incarnations: dict[str, int] = {}
        self._trainer: Any = None
        self._evaluator: Any = None
        self._reward: Any = None
        self._server: Any = None
        self._weights: Handle | None = None

    # ------------------------------------------------------------------ orders

    def start(self) -> None:
        """Start parameter server and rewards; then the trainer, and once there are weights, the instances."""
        config = self._config
        self._server = _actor(ParameterServerActor, "life").remote(self._logs)
        start = self._server.start.remote(self._run_name, config.cluster.shared_memory_dir)
        self._expect(start, "the parameter server", self._on_server_up)
        self._reward = _actor(RewardActor, "submit", "answers").remote(config, self._logs)
        self._await_answers(config.cluster.start_timeout_s)

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Hand commands to an instance; a lost one is noticed by its `updates` call."""
        actor = self._instances.get(instance)
        if actor is not None:
            actor.deliver.options(concurrency_group="deliver").remote(commands, payloads)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Hand trajectories to the rewards."""
        call = self._reward.submit.options(concurrency_group="submit").remote(trajectories)
        self._expect(call, "the rewards", lambda _: [])

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """Hand a batch to the trainer."""
        self._expect(self._trainer.train.remote(batch, hold), "the trainer", lambda message: [message])

    def save(self, version: int) -> None:
        """Have the trainer save, after the step it is at."""
        self._expect(self._trainer.save.remote(version), "the trainer", lambda message: [message])

    def evaluate(self, version: int) -> None:
        """Evaluate; the trainer lets the version go afterwards."""

        def done(message: Message) -> list[Message]:
            self.release(version)
            return [message]

        self._expect(self._evaluator.evaluate.remote(version), "the evaluation", done)

    def release(self, version: int) -> None:
        """The trainer holds it."""
        self._trainer.release.remote(version)

    # ------------------------------------------------------------------ messages

    def poll(self, timeout_s: float) -> Sequence[Message]:
        """Wait for the first finished call, then take all that are finished."""
        waiting = list(self._calls)
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if ready and len(waiting) > 1:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        messages: list[Message] = []
        for reference in ready:
            messages += self._finish(reference, self._calls.pop(reference))
        now = self._clock.now()
        for reference in [r for r, call in self._calls.items() if call.due < now]:
            call = self._calls.pop(reference)
            messages += call.on_error(call.late, False)
        return messages

    def close(self) -> None:
        """End parts in good order where they answer, and kill them all."""
        last_words = [
            a.close.remote() for a in (self._reward, self._evaluator, self._server) if a is not None
        ]
        if last_words:
            try:
                ray.wait(last_words, num_returns=len(last_words), timeout=CLOSE_WAIT_S)
            except RayError as error:
                _log.warning("a part did not end in good order: %s", error)
        parts = [*self._instances.values(), self._trainer, self._evaluator, self._reward, self._server]
        for actor in parts:
            if actor is not None:
                ray.kill(actor)
        self._instances, self._calls = {}, {}
        self._trainer = self._evaluator = self._reward = self._server = None

    def _finish(self, reference: Any, call: _Call) -> list[Message]:
        try:
            return call.on_result(ray.get(reference, timeout=0))
        except GetTimeoutError:
            return call.on_error("its answer was lost", False)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            _log.error("%s failed: %s", call.part, error)
            return call.on_error(_said(cause), isinstance(cause, UserError))
        except RayError as error:
            _log.error("%s failed: %s", call.part, error)
            return call.on_error(_death(error), False)

    def _expect(
        self,
        reference: Any,
        part: str,
        on_result: Callable[[Any], list[Message]],
        limit_s: float = math.inf,
    ) -> None:
        """The run fails when the call does, or takes longer than `limit_s`."""

        def failed(reason: str, blame_user: bool) -> list[Message]:
            return [PartFailed(part=part, reason=reason, blame_user=blame_user)]

        self._calls[reference] = self._limited(_Call(part, on_result, failed), limit_s)

    def _limited(self, call: _Call, limit_s: float) -> _Call:
        call.due, call.late = self._clock.now() + limit_s, f"no answer for {limit_s:.0f} s"
        return call

    def _on_server_up(self, weights: Handle) -> list[Message]:
        config, self._weights = self._config, weights
        self._await_life()
        self._trainer = _actor(TrainerActor).remote(config, weights, self._checkpoints, self._logs)
        hold = bool(config.evaluation.every)
        start = self._trainer.start.remote(self._start_point, hold)
        self._expect(start, "the trainer", self._on_trainer_up)
        if config.evaluation.every:
            self._evaluator = _actor(EvaluatorActor).remote(config, weights, self._logs)
            self._expect(self._evaluator.start.remote(), "the evaluation", lambda _: [])
        return []

    def _on_trainer_up(self, message: Message) -> list[Message]:
        for name in instance_names(self._config):
            self._start_instance(name)
        return [message]

    def _await_answers(self, limit_s: float) -> None:
        def scored(message: Scored) -> list[Message]:
            self._await_answers(SILENT_LIMIT_S)
            return [message] if message.rewards else []

        call = self._reward.answers.options(concurrency_group="answers").remote(ANSWER_WAIT_S)
        self._expect(call, "the rewards", scored, limit_s)

    def _await_life(self) -> None:
        """Without its owner's process the storage of the weights belongs to nobody and may be swept."""

        def alive(_: None) -> list[Message]:
            self._await_life()
            return []

        call = self._server.live.options(concurrency_group="life").remote(ANSWER_WAIT_S)
        self._expect(call, "the parameter server", alive, SILENT_LIMIT_S)

    # ------------------------------------------------------------------ instances

    def _start_instance(self, name: str) -> None:
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        actor = _actor(RolloutActor, "deliver", "updates").remote(
            self._config, name, incarnation, self._weights, self._logs
        )
        self._instances[name] = actor

        def up(message: InstanceJoined) -> list[Message]:
            self._await_update(name, incarnation)
            return [message]

        call = _Call(name, up, self._loses(name, incarnation))
        self._calls[actor.start.remote()] = self._limited(call, self._config.cluster.start_timeout_s)

    def _await_update(self, name: str, incarnation: int) -> None:
        def updated(update: Any) -> list[Message]:
            self._await_update(name, incarnation)
            return [] if update is None else [InstanceUpdated(update=update)]

        reference = self._instances[name].updates.options(concurrency_group="updates").remote(ANSWER_WAIT_S)
        call = _Call(name, updated, self._loses(name, incarnation))
        self._calls[reference] = self._limited(call, self._config.rollout.lost_after_s + ANSWER_WAIT_S)

    def _loses(self, name: str, incarnation: int) -> Callable[[str, bool], list[Message]]:
        def lost(reason: str, blame_user: bool) -> list[Message]:
            if blame_user:
                return [PartFailed(part=name, reason=reason, blame_user=True)]
            return self._replace(name, reason)

        return lost

    def _replace(self, name: str, reason: str) -> list[Message]:
        incarnation = self._incarnations[name]
        ray.kill(self._instances.pop(name))
        messages: list[Message] = [InstanceDown(instance=name, incarnation=incarnation, reason=reason)]
        if incarnation <= MAX_RESTARTS:
            self._start_instance(name)
        elif not self._instances:
            messages.append(PartFailed(part="every rollout instance", reason=reason))
        return messages


def _actor(cls: type, *groups: str) -> Any:
    """`cls` as an actor class, with one thread for each named group of calls."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if groups:
        options["concurrency_groups"] = dict.fromkeys(groups, 1)
    return ray.remote(**options)(cls)


def _death(error: RayError) -> str:
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return str(error).strip().splitlines()[-1]  # the constructor's own exception
    return f"its process died ({type(error).__name__})"


def _said(error: Exception) -> str:
    text = str(error) or repr(error)
    return text if isinstance(error, StaleflowError) else f"{type(error).__name__}: {text}".splitlines()[0]
