"""The trainer as a process; a push runs concurrently with the next step.

Invariants:

- one version is pushed at a time, in order; a step does not update the weights before the push of its start
  version is over;
- a failed push fails `pushed` and the next step;
- further ranks of the trainer are children of this actor and end with it.

::

    train(batch s) ──passes──> [wait for push of s] ──update──> StepTrained ──> train(batch s + 1) ...
                                                          └──thread: push of s + 1──> pushed(s + 1)
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from staleflow.data.trajectory import TrainBatch
from staleflow.runtime.backend import TrainerUp, step_trained
from staleflow.runtime.backends.ray.actors import log_to
from staleflow.runtime.backends.ray.builders import TrainerBuilder
from staleflow.runtime.backends.ray.placement import Placement
from staleflow.servers.transport import Handle, Lease
from staleflow.telemetry.events import CheckpointSaved, StepTrained, WeightsPushed


class TrainerActor:
    """See the module. `pushed` and `release` run on separate threads."""

    def __init__(
        self,
        make_trainer: TrainerBuilder,
        weights: Handle,
        checkpoints: Path,
        logs: Path,
        *,
        keep: int,
        placement: Placement | None = None,
    ) -> None:
        """`keep`: number of newest checkpoints kept. `placement`: of further ranks; None: child processes."""
        log_to(logs, "trainer")
        self._make_trainer = make_trainer
        self._keep = keep
        self._checkpoints = checkpoints
        self._logs = logs
        self._placement = placement
        self._publisher = weights.publisher()
        self._held: dict[int, Lease] = {}
        self._thread = ThreadPoolExecutor(1, "push")
        self._pushes: dict[int, Future[WeightsPushed]] = {}

    def start(self, hold: bool) -> TrainerUp:
        """Build the trainer and push its weights."""
        options: dict[str, Any] = {}
        if self._placement is not None:
            from staleflow.runtime.backends.ray.ranks import own_host, ray_launch

            options = {"launch": ray_launch(self._placement, self._logs), "host": own_host()}
        self._trainer = self._make_trainer(**options)
        pushed = self._push(self._trainer.version, hold)
        return TrainerUp(version=pushed.version, push_s=pushed.seconds)

    def train(self, batch: TrainBatch, hold: bool) -> StepTrained:
        """One step. Its push may still run when this returns; `pushed` waits for it."""
        began, waited_s = time.monotonic(), 0.0

        def wait() -> None:
            nonlocal waited_s
            waiting = time.monotonic()
            for push in list(self._pushes.values()):
                push.result()
            waited_s += time.monotonic() - waiting

        result = self._trainer.train(batch, wait)
        update_s = time.monotonic() - began - waited_s
        wait()  # if nothing was updated, the trainer has not called it
        # Keep the previous push, for a late `pushed`.
        self._pushes = {v: p for v, p in self._pushes.items() if v == result.version_start}
        self._pushes[result.version] = self._thread.submit(self._push, result.version, hold)
        return step_trained(result, update_s=update_s, waited_s=waited_s)

    def pushed(self, version: int) -> WeightsPushed:
        """Wait until `version` is pushed."""
        return self._pushes[version].result()

    def save(self, version: int) -> CheckpointSaved:
        """Write a checkpoint, whole or not at all."""
        from staleflow.training.checkpoints import write_checkpoint

        began = time.monotonic()
        write_checkpoint(self._checkpoints, version, self._trainer.save, self._keep)
        return CheckpointSaved(version=version, seconds=time.monotonic() - began)

    def release(self, version: int) -> None:
        """Release a held version."""
        lease = self._held.pop(version, None)
        if lease is not None:
            lease.release()

    def close(self) -> None:
        """End the trainer's ranks."""
        self._trainer.close()

    def _push(self, version: int, hold: bool) -> WeightsPushed:
        began = time.monotonic()
        self._publisher.push(version, self._trainer.weights())
        if hold:
            self._held[version] = self._publisher.hold(version)
        return WeightsPushed(version=version, seconds=time.monotonic() - began)
