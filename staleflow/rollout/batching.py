"""Engine base class: everything that does not depend on how tokens are computed.

::

    add ──> waiting ──admit (KV room)──> running ──decode──> finished: returned by step, forgotten
               ^                           │  │
               └──────── preempt ──────────┘  └──> interrupt, abort: returned, forgotten

A subclass enters trajectories into its batch, drops them, and draws the next tokens. Queues, budgets, version
stamps and finish reasons are decided here, once for all engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from staleflow.data.trajectory import FinishReason, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.engine import EngineLoad, OnPull, SamplingParams
from staleflow.rollout.scheduler import Generation, Scheduler


class BatchingEngine(ABC):
    """Base of the engines that use `Scheduler`; keeps the `Engine` protocol's invariants."""

    def __init__(
        self, *, sampling: SamplingParams, kv_capacity_tokens: int, max_running: int, version: int
    ) -> None:
        self._sampling = sampling
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._scheduler = Scheduler(
            kv_capacity=kv_capacity_tokens, max_running=max_running, max_model_len=sampling.max_model_len
        )
        self._version = version
        self._generated = 0
        self._decode_steps = 0
        self._running_steps = 0
        self._kv_token_steps = 0
        self._prefilled = 0
        self._closed = False

    @abstractmethod
    def _enter(self, generations: Sequence[Generation]) -> None:
        """Build the KV of trajectories joining the batch."""

    @abstractmethod
    def _leave(self, generations: Sequence[Generation]) -> None:
        """Drop the KV of trajectories leaving the batch."""

    @abstractmethod
    def _decode(self, running: Sequence[Generation]) -> Iterable[tuple[Generation, int, float]]:
        """Draw the next token of each: (trajectory, token, log-prob). Must not append it itself."""

    @abstractmethod
    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """As in `Engine`: swap weights in place, or raise EngineError and keep the old ones."""

    @property
    def version(self) -> int:
        """Weight version loaded."""
        return self._version

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory. Raises EngineError if this engine can never continue it."""
        self._check_open()
        self._scheduler.add(trajectory, greedy=greedy)

    def step(self) -> Sequence[Trajectory]:
        """One decode step for all running trajectories. Returns those that finished, and forgets them."""
        self._check_open()
        schedule = self._scheduler.schedule()
        if schedule.preempted:
            self._leave(schedule.preempted)
        if schedule.admitted:
            self._enter(schedule.admitted)
        finished = [g.trajectory(FinishReason.LENGTH) for g in schedule.spent]
        running = self._scheduler.running
        if running:
            drawn = self._decode(running)
            self._decode_steps += 1
            self._running_steps += len(running)
            self._kv_token_steps += self._scheduler.kv_tokens
            self._prefilled += sum(g.length for g in schedule.admitted)
            finished += self._extend(drawn)
        return finished

    def _extend(self, drawn: Iterable[tuple[Generation, int, float]]) -> list[Trajectory]:
        ended: list[tuple[Generation, FinishReason]] = []
        for generation, token, log_prob in drawn:
            generation.append(token, log_prob, self._version)
            self._generated += 1
            reason = self._reason_to_finish(generation)
            if reason is not None:
                ended.append((generation, reason))
        if ended:
            _, were_running = self._scheduler.remove(g.trajectory_id for g, _ in ended)
            self._leave(were_running)
        return [generation.trajectory(reason) for generation, reason in ended]

    def _reason_to_finish(self, generation: Generation) -> FinishReason | None:
        if generation.tokens[-1] in self._stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if generation.length >= generation.bound else None

    def interrupt(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories, tokens kept. Unknown ids (finished meanwhile) are skipped."""
        gone, were_running = self._scheduler.remove(trajectory_ids)
        if were_running:
            self._leave(were_running)
        return [g.trajectory() for g in gone]

    def abort(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories whose tokens are no longer needed. Unknown ids are skipped."""
        return self.interrupt(trajectory_ids)

    def trajectories(self) -> Mapping[str, Trajectory]:
        """All trajectories held, running or waiting, with their tokens so far."""
        return {g.trajectory_id: g.trajectory() for g in self._scheduler.held}

    def load(self) -> EngineLoad:
        """Counts for the snapshot."""
        return EngineLoad(
            running=len(self._scheduler.running),
            waiting=self._scheduler.waiting_count,
            kv_tokens=self._scheduler.kv_tokens,
            kv_capacity=self._scheduler.kv_capacity,
            preemptions=self._scheduler.preemptions,
            generated_tokens=self._generated,
            decode_steps=self._decode_steps,
            running_steps=self._running_steps,
            kv_token_steps=self._kv_token_steps,
            prefilled_tokens=self._prefilled,
        )

    def close(self) -> None:
        """Drop all trajectories; may be called twice. A later `add` or `step` raises EngineError."""
        if not self._closed:
            self.interrupt([g.trajectory_id for g in self._scheduler.held])
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
