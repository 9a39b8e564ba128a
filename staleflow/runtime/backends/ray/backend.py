"""The Ray backend: every part is an actor, orders are calls, messages are finished calls.

Flow: for each instance one call is always under way, first `start`, then `updates`, which returns when the
instance has news (at most once per coordination interval) or after a while as a sign of life. If a call does
not return in time, or ends with an error, the instance is lost: its actor is killed and a new incarnation
started. Rewards and parameter server give signs of life in the same way, and the run fails without them.
Training steps, checkpoints and evaluations have no time limit.

Invariants: only `poll` blocks the loop, and not beyond its deadline; parts that share a GPU start one after
the other, because vLLM attributes all memory taken during its start to itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from staleflow.config.schema import Config
from staleflow.coordination.actions import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.runtime.backend import (
    Environments,
    EnvironmentsAnswered,
    Message,
    PartFailed,
    RewardsReady,
)
from staleflow.runtime.backends.ray.actors import (
    EvaluatorActor,
    ParameterServerActor,
    RewardActor,
    RolloutActor,
    WeightDirectoryActor,
)
from staleflow.runtime.backends.ray.builders import PartBuilders
from staleflow.runtime.backends.ray.calls import Calls, OnError
from staleflow.runtime.backends.ray.placement import Placement
from staleflow.runtime.backends.ray.trainer_actor import TrainerActor
from staleflow.runtime.clock import Clock
from staleflow.servers.directory import DIRECTORY_GROUPS
from staleflow.servers.transport import Handle
from staleflow.telemetry.events import EvaluationFailed, InstanceDown, StepTrained

ANSWER_WAIT_S = 2.0
"""A part without news gives a sign of life after this time."""
SILENT_LIMIT_S = 60.0
"""Rewards or parameter server without a sign of life for this long are considered dead."""
MAX_RESTARTS = 3
"""Limit on restarts. After these an instance stays down; if it is the evaluation, the run fails."""
CLOSE_WAIT_S = 5.0
"""Time limit for a clean shutdown of a part before its process is killed."""

_log = logging.getLogger(__name__)


class RayBackend:
    """See the module. It lives in the actor that runs the loop; all other actors are its children."""

    def __init__(
        self,
        config: Config,
        parts: PartBuilders,
        *,
        instances: Sequence[str],
        run_name: str,
        checkpoints: Path,
        logs: Path,
        clock: Clock,
        placement: Placement | None = None,
        environments: Environments | None = None,
    ) -> None:
        """`placement` None: Ray chooses where each part runs. `environments` run in this process; None: every
        turn is the last.
        """
        self._clock = clock
        self._environments = environments
        self._config = config
        self._placement = placement or Placement()
        self._parts = parts
        self._names = list(instances)
        self._run_name = run_name
        self._checkpoints = checkpoints
        self._logs = logs
        self._calls = Calls(clock)
        self._instances: dict[str, Any] = {}
        self._incarnations: dict[str, int] = {}
        self._to_start: deque[str] = deque()  # instances waiting for their turn to start
        self._trainer: Any = None
        self._evaluator: Any = None
        self._evaluator_failures = 0
        self._reward: Any = None
        self._server: Any = None
        self._weights: Handle | None = None

    # ------------------------------------------------------------------ orders

    def start(self) -> None:
        """Start parameter server and rewards, then the trainer, and when there are weights, the instances."""
        config = self._config
        self._start_server()
        places = self._placement.options("reward")
        self._reward = _actor(RewardActor, places, submit=1, answers=1).remote(self._parts, self._logs)
        self._await_answers(config.cluster.start_timeout_s)

    def _start_server(self) -> None:
        cluster, places = self._config.cluster, self._placement.options("servers")
        transport = cluster.transport
        if transport == "auto":
            transport = "shared_memory" if cluster.address is None else "auto"
        if transport == "shared_memory" or "." in transport:
            self._server = _actor(ParameterServerActor, places, life=1).remote(self._logs)
            options = cluster.transport_options
            if transport == "shared_memory":
                options = {"guarded": True, "directory": cluster.shared_memory_dir}
            start = self._server.start.remote(self._run_name, transport, options)
        else:
            self._server = _actor(WeightDirectoryActor, places, **DIRECTORY_GROUPS).remote(self._logs)
            start = self._server.start.remote(
                self._run_name,
                cluster.shared_memory_dir,
                transport=transport,
                piece_bytes=cluster.transfer_mb * 2**20,
            )
        self._calls.expect(start, "the parameter server", self._on_server_up)

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Send commands to an instance; its `updates` call detects a lost one."""
        actor = self._instances.get(instance)
        if actor is not None:
            actor.deliver.options(concurrency_group="deliver").remote(commands, payloads)

    @property
    def more_now(self) -> bool:
        """Does nothing: real time passes by itself."""
        return False

    def respond(self, trajectories: Sequence[Trajectory]) -> None:
        """Send trajectories to the environments."""
        assert self._environments is not None
        self._environments.submit(trajectories)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Send trajectories to the rewards."""
        call = self._reward.submit.options(concurrency_group="submit").remote(trajectories)
        self._calls.expect(call, "the rewards", lambda _: [])

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """Send a batch to the trainer; when the step is done, wait for its push."""

        def trained(message: StepTrained) -> list[Message]:
            pushed = self._trainer.pushed.options(concurrency_group="pushed").remote(message.step + 1)
            self._calls.expect(pushed, "the push of the weights", lambda pushed: [pushed])
            return [message]

        self._calls.expect(self._trainer.train.remote(batch, hold), "the trainer", trained)

    def save(self, version: int) -> None:
        """Let the trainer save a checkpoint after its current step."""
        self._calls.expect(self._trainer.save.remote(version), "the trainer", lambda message: [message])

    def evaluate(self, version: int) -> None:
        """Evaluate a version; afterwards the trainer releases it."""

        def done(message: Message) -> list[Message]:
            self.release(version)
            return [message]

        def failed(reason: str, blame_user: bool) -> list[Message]:
            self._evaluator_failures += 1
            if blame_user or self._evaluator_failures > MAX_RESTARTS:
                return [PartFailed(part="the evaluation", reason=reason, blame_user=blame_user)]
            self.release(version)
            ray.kill(self._evaluator)
            self._start_evaluator()
            return [EvaluationFailed(version=version, reason=reason)]

        call = self._evaluator.evaluate.remote(version)
        self._calls.expect(call, "the evaluation", done, on_error=failed)

    def release(self, version: int) -> None:
        """Let the trainer release a version that it holds."""
        self._trainer.release.remote(version)

    # ------------------------------------------------------------------ messages

    def poll(self, until: float) -> Sequence[Message]:
        """Wait until `until` for the first call to finish, then return the messages of all finished calls."""
        answers = self._environments.poll(0.0) if self._environments is not None else ()
        timeout_s = 0.0 if answers else max(0.0, until - self._clock.now())
        messages = self._calls.poll(timeout_s)
        return [EnvironmentsAnswered(answers=tuple(answers)), *messages] if answers else messages

    def close(self) -> None:
        """Shut down cleanly the parts that answer, then kill all of them."""
        if self._environments is not None:
            self._environments.close()
        closing = [a.close.remote() for a in (self._reward, self._evaluator, self._server) if a is not None]
        if closing:
            try:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_WAIT_S)
            except RayError as error:
                _log.warning("a part did not shut down cleanly: %s", error)
        parts = [*self._instances.values(), self._trainer, self._evaluator, self._reward, self._server]
        for actor in parts:
            if actor is not None:
                ray.kill(actor)
        self._instances = {}
        self._calls.clear()
        self._trainer = self._evaluator = self._reward = self._server = None

    def _on_server_up(self, weights: Handle) -> list[Message]:
        self._weights = weights
        self._await_life()
        if self._config.evaluation.every:
            self._start_evaluator()
        if self._evaluator is None or not self._placement.shares_gpus:
            self._start_trainer()
        return []

    def _start_evaluator(self) -> None:
        evaluator = _actor(EvaluatorActor, self._placement.options("evaluation"))
        self._evaluator = evaluator.remote(self._parts, self._weights, self._logs)
        limit_s = self._config.cluster.start_timeout_s
        start = self._evaluator.start.remote()
        self._calls.expect(start, "the evaluation", self._on_evaluator_up, limit_s=limit_s)

    def _on_evaluator_up(self, _: None) -> list[Message]:
        if self._trainer is None:
            self._start_trainer()
        return []

    def _start_trainer(self) -> None:
        config, places = self._config, self._placement
        trainer = _actor(TrainerActor, places.options("training"), pushed=1)
        self._trainer = trainer.remote(
            self._parts.trainer,
            self._weights,
            self._checkpoints,
            self._logs,
            keep=config.checkpoint.keep,
            placement=places,
        )
        start = self._trainer.start.remote(bool(config.evaluation.every))
        self._calls.expect(start, "the trainer", self._on_trainer_up)

    def _on_trainer_up(self, message: Message) -> list[Message]:
        self._to_start.extend(self._names)
        for _ in range(1 if self._placement.shares_gpus else len(self._to_start)):
            self._start_next()
        return [message]

    def _start_next(self) -> None:
        if self._to_start:
            self._start_instance(self._to_start.popleft())

    def _await_answers(self, limit_s: float) -> None:
        def scored(message: RewardsReady) -> list[Message]:
            self._await_answers(SILENT_LIMIT_S)
            return [message] if message.rewards else []

        call = self._reward.answers.options(concurrency_group="answers").remote(ANSWER_WAIT_S)
        self._calls.expect(call, "the rewards", scored, limit_s=limit_s)

    def _await_life(self) -> None:
        """Ask for signs of life: the storage of the weights is removed when its owner's process dies."""

        def alive(_: None) -> list[Message]:
            self._await_life()
            return []

        call = self._server.live.options(concurrency_group="life").remote(ANSWER_WAIT_S)
        self._calls.expect(call, "the parameter server", alive, limit_s=SILENT_LIMIT_S)

    # ------------------------------------------------------------------ instances

    def _start_instance(self, name: str) -> None:
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        places = self._placement.options("rollout", self._names.index(name))
        actor = _actor(RolloutActor, places, deliver=1, updates=1).remote(
            self._config, self._parts, name, incarnation, self._weights, self._logs
        )
        self._instances[name] = actor

        def up(message: InstanceJoined) -> list[Message]:
            self._await_update(name)
            self._start_next()
            return [message]

        self._calls.expect(
            actor.start.remote(),
            name,
            up,
            on_error=self._on_lost(name),
            limit_s=self._config.cluster.start_timeout_s,
        )

    def _await_update(self, name: str) -> None:
        def updated(update: Any) -> list[Message]:
            self._await_update(name)
            return [] if update is None else [update]

        reference = self._instances[name].updates.options(concurrency_group="updates").remote(ANSWER_WAIT_S)
        limit_s = self._config.rollout.lost_after_s + ANSWER_WAIT_S
        self._calls.expect(reference, name, updated, on_error=self._on_lost(name), limit_s=limit_s)

    def _on_lost(self, name: str) -> OnError:
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
            return messages
        self._start_next()
        if not self._instances:
            messages.append(PartFailed(part="every rollout instance", reason=reason))
        return messages


def _actor(cls: type, places: Mapping[str, Any], **groups: int) -> Any:
    """`cls` as an actor class with options `places`; `groups`: threads of each concurrency group."""
    options: dict[str, Any] = {"max_restarts": 0, **places}
    if groups:
        options["concurrency_groups"] = groups
    return ray.remote(**options)(cls)
