"""The inline backend: every part in this process, in a fixed order, on a virtual clock.

For tests and debugging. A run is a function of its config: the same config gives the same ledger. Training
overlaps rollout as it does on a cluster: a step is done only `train_polls` polls after its batch was handed
over, its weights appear `push_polls` polls later, and rollout and the next step go on meanwhile. What hangs,
hangs the process: time limits need `ray`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from staleflow.coordination.actions import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.errors import EngineError
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine, OnPull
from staleflow.rollout.instance import RolloutInstance
from staleflow.runtime.backend import (
    Environments,
    EnvironmentsAnswered,
    Message,
    PartFailed,
    RewardsReady,
    TrainerUp,
    step_trained,
)
from staleflow.runtime.clock import Clock
from staleflow.runtime.evaluation import Evaluator, Scorer
from staleflow.servers.transport import Lease, Transport
from staleflow.telemetry.events import CheckpointSaved, Evaluated, InstanceDown, WeightsPushed
from staleflow.training.trainer import Trainer

MAX_RESTARTS = 3
"""Restarts of one instance; then it stays down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlinePace:
    """How fast the parts are, relative to each other."""

    decode_steps: int = 4
    """Decode steps of each instance in a poll."""
    train_polls: int = 8
    """Polls from a batch to the end of its step."""
    push_polls: int = 0
    """Polls from a step's end to its pushed weights, for which the next update waits; 0: the same poll."""
    poll_s: float = 0.05
    """Virtual seconds that a poll takes."""


class InlineBackend:
    """See the module."""

    def __init__(
        self,
        *,
        instances: Sequence[str],
        make_engine: Callable[[str, int], Engine],
        max_running: int,
        on_pull: OnPull,
        progress_interval_s: float,
        trainer: Trainer,
        save: Callable[[Trainer, int], None],
        scorer: Scorer,
        request: Callable[[Trajectory], ScoreRequest],
        evaluator: Evaluator | None,
        weights: Transport,
        clock: Clock,
        environments: Environments | None = None,
        pace: InlinePace | None = None,
    ) -> None:
        """`make_engine(instance, incarnation)` makes an engine without weights (version -1). `environments`
        None: every turn is the last.
        """
        self._environments = environments
        self._names = instances
        self._make_engine = make_engine
        self._max_running = max_running
        self._on_pull = on_pull
        self._progress_interval_s = progress_interval_s
        self._trainer = trainer
        self._save_trainer = save
        self._scorer = scorer
        self._request = request
        self._evaluator = evaluator
        self._clock = clock
        self._pace = pace or InlinePace()
        self._weights = weights
        self._publisher = weights.handle.publisher()
        self._held: dict[int, Lease] = {}
        self._instances: dict[str, RolloutInstance] = {}
        self._engines: dict[str, Engine] = {}
        self._incarnations: dict[str, int] = {}
        self._messages: list[Message] = []
        self._training: tuple[TrainBatch, bool] | None = None
        self._training_since = 0.0
        self._polls_left = 0
        self._pushing: tuple[int, bool] | None = None
        self._push_polls_left = 0

    def start(self) -> None:
        """Push the trainer's weights and start every instance."""
        version = self._trainer.version
        self._publisher.push(version, self._trainer.weights())
        self._held[version] = self._publisher.hold(version)
        self._messages.append(TrainerUp(version=version, push_s=0.0))
        for name in self._names:
            self._start_instance(name)

    def deliver(self, instance: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Apply at once."""
        if instance in self._instances:
            self._guarded(instance, lambda i: i.apply(commands, payloads))

    @property
    def more_now(self) -> bool:
        """Every poll takes time."""
        return False

    def respond(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask at once; the answers come with the next poll."""
        assert self._environments is not None
        self._environments.submit(trajectories)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score at once; the rewards come with the next poll."""
        self._scorer.submit([self._request(t) for t in trajectories])

    def train(self, batch: TrainBatch, *, hold: bool) -> None:
        """Train `train_polls` polls from now."""
        self._training, self._training_since = (batch, hold), self._clock.now()
        self._polls_left = self._pace.train_polls

    def save(self, version: int) -> None:
        """Save at once."""
        self._save_trainer(self._trainer, version)
        self._messages.append(CheckpointSaved(version=version, seconds=0.0))

    def evaluate(self, version: int) -> None:
        """Evaluate at once."""
        lease = self._held.pop(version, None) or self._publisher.hold(version)
        with lease:
            values = self._evaluator.evaluate(lease.tensors, version) if self._evaluator else {}
        self._messages.append(Evaluated(version=version, values=values, seconds=0.0))

    def release(self, version: int) -> None:
        """At once."""
        lease = self._held.pop(version, None)
        if lease is not None:
            lease.release()

    def poll(self, until: float) -> Sequence[Message]:
        """Let every part work for a while, in a fixed order, whatever `until` is."""
        self._clock.sleep(self._pace.poll_s)
        for name in list(self._instances):
            self._work(name)
        if self._environments is not None:
            answers = self._environments.poll(0.0)
            if answers:
                self._messages.append(EnvironmentsAnswered(answers=tuple(answers)))
        rewards = self._scorer.poll(0.0)
        if rewards:
            self._messages.append(RewardsReady(tuple(rewards)))
        self._push_on()
        self._train_on()
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        """Free everything."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._instances.clear()
        for lease in self._held.values():
            lease.release()
        self._held.clear()
        self._publisher.close()
        self._weights.close()
        self._trainer.close()
        self._scorer.close()
        if self._environments is not None:
            self._environments.close()
        if self._evaluator is not None:
            self._evaluator.close()

    def _start_instance(self, name: str) -> None:
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        engine = self._make_engine(name, incarnation)
        subscriber = self._weights.handle.subscriber()
        with subscriber.lease() as lease:
            engine.load_weights(lease.tensors, lease.version, self._on_pull)
        self._engines[name] = engine
        self._instances[name] = RolloutInstance(
            instance=name,
            incarnation=incarnation,
            engine=engine,
            subscriber=subscriber,
            on_pull=self._on_pull,
            clock=self._clock.now,
            progress_interval_s=self._progress_interval_s,
        )
        self._messages.append(
            InstanceJoined(
                instance=name,
                incarnation=incarnation,
                version=engine.version,
                kv_capacity=engine.load().kv_capacity,
                max_running=self._max_running,
            )
        )

    def _work(self, name: str) -> None:
        def decode(instance: RolloutInstance) -> None:
            for _ in range(self._pace.decode_steps):
                instance.advance()
            self._messages.append(instance.take_report())

        self._guarded(name, decode)

    def _guarded(self, name: str, work: Callable[[RolloutInstance], None]) -> None:
        try:
            work(self._instances[name])
        except EngineError as error:
            del self._instances[name]
            self._engines.pop(name).close()
            incarnation = self._incarnations[name]
            self._messages.append(InstanceDown(instance=name, incarnation=incarnation, reason=str(error)))
            if incarnation <= MAX_RESTARTS:
                self._start_instance(name)
            elif not self._instances:
                self._messages.append(PartFailed(part="every rollout instance", reason=str(error)))

    def _train_on(self) -> None:
        if self._training is None:
            return
        self._polls_left -= 1
        if self._polls_left > 0:
            return
        batch, hold = self._training
        self._training = None
        result = self._trainer.train(batch, self._push)
        self._push()  # where nothing was updated, nothing waited for it
        self._pushing, self._push_polls_left = (result.version, hold), self._pace.push_polls
        update_s = self._clock.now() - self._training_since
        self._messages.append(step_trained(result, update_s=update_s))
        if self._pace.push_polls == 0:
            self._push()

    def _push_on(self) -> None:
        self._push_polls_left -= 1
        if self._push_polls_left <= 0:
            self._push()

    def _push(self) -> None:
        """Push the weights of the last step, if they are not yet."""
        if self._pushing is None:
            return
        (version, hold), self._pushing = self._pushing, None
        self._publisher.push(version, self._trainer.weights())
        if hold:
            self._held[version] = self._publisher.hold(version)
        self._messages.append(WeightsPushed(version=version, seconds=0.0))
