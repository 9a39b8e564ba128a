"""The parts as processes. `RayBackend` makes each class a Ray actor.

Invariants: an actor builds its part inside its own process, and in `start` if the user's input may be wrong,
because Ray reports an exception in a constructor as a death without a cause; messages are few and large (one
call per instance and interval, never one per trajectory); weights go from the trainer's process into the
parameter server's storage and from there into other processes, never through an actor call.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.coordination.actions import Command, Pull
from staleflow.coordination.events import InstanceJoined
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.trajectory import Trajectory
from staleflow.errors import EngineError, TransportError
from staleflow.rollout.instance import RolloutInstance
from staleflow.runtime.backend import RewardsReady
from staleflow.runtime.backends.ray.builders import PartBuilders
from staleflow.servers.directory import WeightDirectory
from staleflow.servers.parameter_server import ParameterServer
from staleflow.servers.transport import Handle, wait_for_weights
from staleflow.telemetry.events import Evaluated

EVALUATION_NICENESS = 5
"""If cores are scarce, evaluation gets about a third of the CPU share of a part that training waits for."""
TRANSFER_WAIT_S = 30.0
"""A Pull waits this long for weights on their way to this node; then it is refused and ordered again."""
IDLE_WAIT_S = 0.05
"""An idle decode thread sleeps this long, unless commands wake it."""


def log_to(folder: Path, part: str) -> None:
    """Write this process's log messages to `<folder>/<part>.log` if this node sees the folder."""
    if not folder.is_dir():
        return
    handler = logging.FileHandler(folder / f"{part}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


class ParameterServerActor:
    """Owns the storage of the weights on one node."""

    def __init__(self, logs: Path) -> None:
        log_to(logs, "parameter_server")

    def start(self, run_name: str, transport: str, options: Mapping[str, Any]) -> Handle:
        """Create the storage; returns the handle for the other processes."""
        given = {name: value for name, value in options.items() if value is not None}
        self._server = ParameterServer(transport, run_name=run_name, **given)
        return self._server.handle

    def live(self, wait_s: float) -> None:
        """Liveness check: returns after `wait_s`."""
        time.sleep(wait_s)

    def close(self) -> None:
        """Remove the storage."""
        self._server.close()


class WeightDirectoryActor(WeightDirectory):
    """Owns the storage of the weights on every node."""

    def __init__(self, logs: Path) -> None:
        log_to(logs, "parameter_server")
        super().__init__(partial(log_to, logs))


class RolloutActor:
    """One rollout instance. A separate thread decodes; calls only pass data to and from it.

    ::

        deliver ──commands──> [inbox] ──> decode thread ──> [outbox] ──report──> updates
    """

    def __init__(
        self,
        config: Config,
        parts: PartBuilders,
        instance: str,
        incarnation: int,
        weights: Handle,
        logs: Path,
    ) -> None:
        log_to(logs, f"rollout-{instance}")
        self._config = config
        self._parts = parts
        self._engine_log = logs / f"rollout-{instance}.engine.log"
        self._name = instance
        self._incarnation = incarnation
        self._weights = weights
        self._interval_s = config.coordination.interval_ms / 1000
        self._inbox: list[tuple[Sequence[Command], Mapping[str, Trajectory]]] = []
        self._wake = threading.Condition()
        self._outbox: queue.Queue[InstanceUpdate] = queue.Queue(maxsize=1)
        self._failure: str | None = None
        self._alive_at = time.monotonic()
        self._newest: Callable[[], int | None] = lambda: None
        self._waits_since: float | None = None

    def start(self) -> InstanceJoined:
        """Build the engine, load the newest weights and start the decode thread."""
        config = self._config
        engine = self._parts.engine(self._weights.here(), self._engine_log)
        subscriber = self._weights.subscriber()
        self._newest = subscriber.newest
        wait_for_weights(subscriber, config.cluster.start_timeout_s)
        with subscriber.lease() as lease:
            engine.load_weights(lease.tensors, lease.version, config.rollout.on_pull)
        instance = RolloutInstance(
            instance=self._name,
            incarnation=self._incarnation,
            engine=engine,
            subscriber=subscriber,
            on_pull=config.rollout.on_pull,
            clock=time.monotonic,
            progress_interval_s=config.rollout.progress_interval_s,
            transfer_limit_s=config.cluster.start_timeout_s,  # as for the first version
        )
        threading.Thread(target=self._decode, args=(instance,), name="decode", daemon=True).start()
        return InstanceJoined(
            instance=self._name,
            incarnation=self._incarnation,
            version=engine.version,
            kv_capacity=engine.load().kv_capacity,
            max_running=config.rollout.max_running,
        )

    def deliver(self, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Queue commands; they are applied between two decode steps."""
        with self._wake:
            self._inbox.append((commands, payloads))
            self._wake.notify()

    def updates(self, wait_s: float) -> InstanceUpdate | None:
        """The next report, or None if there is none within `wait_s`.

        Raises EngineError if the engine failed, or has been in one step for longer than rollout.lost_after_s.
        """
        try:
            return self._outbox.get(timeout=wait_s)
        except queue.Empty:
            pass
        if self._failure is not None:
            raise EngineError(self._failure)
        silent_s = time.monotonic() - self._alive_at
        if silent_s > self._config.rollout.lost_after_s:
            raise EngineError(f"{self._name} has been in one decode step for {silent_s:.0f} s")
        return None

    def _decode(self, instance: RolloutInstance) -> None:
        reported_at = 0.0
        try:
            while True:
                self._alive_at = time.monotonic()
                for commands, payloads in self._take_inbox(instance):
                    instance.apply(commands, payloads)
                instance.advance()
                due = time.monotonic() - reported_at >= self._interval_s
                if due and instance.has_news and self._outbox.empty():
                    self._outbox.put(instance.take_report())
                    reported_at = time.monotonic()
        except Exception as error:
            logging.getLogger(__name__).exception("the decode thread of %s ended", self._name)
            self._failure = str(error) or repr(error)

    def _take_inbox(
        self, instance: RolloutInstance
    ) -> list[tuple[Sequence[Command], Mapping[str, Trajectory]]]:
        with self._wake:
            waits = self._inbox and self._awaits_weights()
            if (waits or not self._inbox) and instance.is_idle:
                self._wake.wait(self._interval_s if instance.has_news else IDLE_WAIT_S)
            if waits:
                return []
            taken, self._inbox = self._inbox, []
        return taken

    def _awaits_weights(self) -> bool:
        """True if the next commands pull a version still on its way to this node, so they should wait.

        Decoding continues meanwhile. A Pull refused at once would be ordered again in every cycle.
        """
        wanted = [c.version for commands, _ in self._inbox for c in commands if isinstance(c, Pull)]
        if not wanted or self._has_version(max(wanted)):
            self._waits_since = None
            return False
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since > TRANSFER_WAIT_S:
            self._waits_since = None
            return False
        return True

    def _has_version(self, version: int) -> bool:
        """True if the version is local, or if the store failed and the pull should report it."""
        try:
            newest = self._newest()
        except TransportError:
            return True
        return newest is not None and newest >= version


class RewardActor:
    """Verifier processes behind one actor."""

    def __init__(self, parts: PartBuilders, logs: Path) -> None:
        log_to(logs, "reward")
        self._pool = parts.scorer(logs / "verifier.log")
        self._request = parts.request()

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Submit trajectories for scoring."""
        self._pool.submit([self._request(t) for t in trajectories])

    def answers(self, wait_s: float) -> RewardsReady:
        """The new rewards; waits up to `wait_s` for the first."""
        return RewardsReady(tuple(self._pool.poll(wait_s)))

    def close(self) -> None:
        """End the verifier processes."""
        self._pool.close()


class EvaluatorActor:
    """Evaluation with its own engines."""

    def __init__(self, parts: PartBuilders, weights: Handle, logs: Path) -> None:
        log_to(logs, "evaluator")
        os.nice(EVALUATION_NICENESS)
        self._parts = parts
        self._weights = weights
        self._engine_log = logs / "evaluator.engine.log"
        self._subscriber = weights.subscriber()

    def start(self) -> None:
        """Build the engines and verifier processes."""
        self._evaluator = self._parts.evaluator(self._weights.here(), self._engine_log)

    def evaluate(self, version: int) -> Evaluated:
        """Evaluate a version that is held or the newest."""
        began = time.monotonic()
        with self._subscriber.lease(version) as lease:
            values = self._evaluator.evaluate(lease.tensors, version)
        return Evaluated(version=version, values=values, seconds=time.monotonic() - began)

    def close(self) -> None:
        """Free the engines and verifier processes."""
        self._evaluator.close()
