"""The fake engine: the torch engine's scheduling, with tokens computed by a formula.

A public, supported engine: for tests of everything above the engine, for dry runs, and for measuring the
system's own overhead. It schedules with the same code as the torch engine (KV budget, preemption, budgets,
version stamps); only the tokens differ:

- token of trajectory t at response position p: `fake_token`, a function of (seed, t, p) alone, never a stop
  token (a greedy trajectory gets the smallest id that is not a stop token); at the scripted length
  (`scripted_lengths.py`) it is the first stop token;
- log-prob: `fake_log_prob` encodes the version of the weights that drew the token *and* of those that filled
  the KV cache, so a stale cache shows in the numbers;
- time: each step and each pull spends the cost model's seconds through the injected `spend`, by default none.

Failures are scripted and counted from the engine's start: see `FakeScript`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from staleflow.coordination.cost_model import CostModel
from staleflow.data.trajectory import FinishReason, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.batching import BatchingEngine
from staleflow.rollout.engine import OnPull, SamplingParams
from staleflow.rollout.randomness import trajectory_key, uniform
from staleflow.rollout.scheduler import Generation
from staleflow.rollout.scripted_lengths import Lengths, fixed, turn_start


def fake_token(seed: int, trajectory_id: str, position: int, allowed: Sequence[int]) -> int:
    """Token at response position `position`: uniform over `allowed` (token ids, not empty)."""
    return allowed[int(uniform(trajectory_key(seed, trajectory_id), position) * len(allowed))]


def fake_log_prob(seed: int, trajectory_id: str, position: int, version: int, kv_version: int) -> float:
    """Log-prob (nats, below 0): a random part in multiples of 1/64, plus parts encoding the two versions.

    -(1 + floor(64 u) / 64) - version / 2**10 - kv_version / 2**16, where u is the random number of trajectory
    id + "/log_prob" at `position`. Exact in float32 for versions 0 to 15, where the parts can be separated;
    beyond, they overlap but still differ.
    """
    number = uniform(trajectory_key(seed, f"{trajectory_id}/log_prob"), position)
    return -(1 + int(64 * number) / 64) - version / 2**10 - kv_version / 2**16


EIGHT_TOKENS = fixed(8)


def wait_for_ever() -> None:
    """Never return. A module-level function, so that a script can be pickled."""
    threading.Event().wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """Failures to inject. Steps are counted from 1, including those with nothing to decode."""

    fail_at_step: int | None = None
    """This step and every later one raise EngineError before anything changes."""
    hang_at_step: int | None = None
    """This step calls `hang` first."""
    hang: Callable[[], object] = wait_for_ever
    refuse_loads: int = 0
    """This many first `load_weights` calls raise EngineError and keep the old version."""
    lose: frozenset[str] = frozenset()
    """Trajectories that are accepted and then vanish without a result, once each."""
    freeze: frozenset[str] = frozenset()
    """Trajectories that stay running and never gain a token."""


class FakeEngine(BatchingEngine):
    """Engine with scripted lengths, speed and failures.

    `lengths` includes the stop token; the budget may end a trajectory earlier. Without stop tokens in
    `sampling`, a trajectory still finishes with STOP at its scripted length. `seconds_per_step`: a number
    or a cost model; its seconds go to `spend` (a sleep, or a virtual clock's advance) before a step returns
    its tokens, and before a pull ends.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        seed: int,
        kv_capacity_tokens: int = 1 << 20,
        max_running: int = 256,
        version: int = 0,
        vocab_size: int = 16,
        lengths: Lengths = EIGHT_TOKENS,
        seconds_per_step: float | CostModel = 0.0,
        spend: Callable[[float], object] | None = None,
        script: FakeScript = FakeScript(),
    ) -> None:
        super().__init__(
            sampling=sampling,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running=max_running,
            version=version,
        )
        self._allowed = [t for t in range(vocab_size) if t not in self._stop_tokens]
        if not self._allowed:
            raise EngineError(f"all {vocab_size} tokens of the vocabulary are stop tokens")
        self._seed = seed
        self._lengths = lengths
        if not isinstance(seconds_per_step, CostModel):
            seconds_per_step = CostModel(k1=0.0, k2=0.0, k3=0.0, k4=seconds_per_step, prefill=0.0)
        self._costs = seconds_per_step
        self._spend = spend
        self._script = script
        self._to_lose = set(script.lose)
        self._steps = 0
        self._loads = 0
        self._entered = 0  # tokens whose KV was built but whose prefill time is not yet spent
        self._end: dict[str, int] = {}  # response position just after the last token of the turn
        self._kv_version: dict[str, int] = {}

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory, unless the script loses it."""
        if trajectory.trajectory_id in self._to_lose:
            self._check_open()
            self._to_lose.remove(trajectory.trajectory_id)
            return
        super().add(trajectory, greedy=greedy)

    def step(self) -> Sequence[Trajectory]:
        """One decode step, or its scripted failure."""
        self._steps += 1
        if self._script.hang_at_step == self._steps:
            self._script.hang()
        if self._script.fail_at_step is not None and self._steps >= self._script.fail_at_step:
            raise EngineError(f"scripted failure at step {self._steps}")
        return super().step()

    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """Set the version and ignore the tensors. Raises EngineError as scripted."""
        self._check_open()
        self._loads += 1
        if self._loads <= self._script.refuse_loads:
            raise EngineError(f"scripted refusal of weight version {version}")
        self._version = version
        rebuilt = 0
        if on_pull == "recompute":
            self._enter(self._scheduler.running)
            rebuilt, self._entered = self._entered, 0
        self._wait(self._costs.pull + self._costs.prefill_s(rebuilt))

    def _enter(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._kv_version[generation.trajectory_id] = self._version
            turn = max(1, self._lengths(generation.origin))
            self._end[generation.trajectory_id] = turn_start(generation.origin) + turn
            self._entered += generation.length

    def _leave(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            del self._kv_version[generation.trajectory_id]
            del self._end[generation.trajectory_id]

    def _decode(self, running: Sequence[Generation]) -> Iterable[tuple[Generation, int, float]]:
        costs = self._costs
        step_s = costs.step_s(len(running), self._scheduler.kv_tokens)
        self._wait(step_s + costs.prefill_s(self._entered))
        self._entered = 0
        return [
            (g, self._token(g), self._log_prob(g))
            for g in running
            if g.trajectory_id not in self._script.freeze
        ]

    def _wait(self, seconds: float) -> None:
        if self._spend is not None:
            self._spend(seconds)

    def _token(self, generation: Generation) -> int:
        if self._ends_at(generation, generation.position + 1) and self._sampling.stop_token_ids:
            return self._sampling.stop_token_ids[0]
        if generation.greedy:
            return self._allowed[0]
        return fake_token(self._seed, generation.trajectory_id, generation.position, self._allowed)

    def _log_prob(self, generation: Generation) -> float:
        identity = generation.trajectory_id
        kv_version = self._kv_version[identity]
        return fake_log_prob(self._seed, identity, generation.position, self._version, kv_version)

    def _ends_at(self, generation: Generation, position: int) -> bool:
        return position >= self._end[generation.trajectory_id]

    def _reason_to_finish(self, generation: Generation) -> FinishReason | None:
        if self._ends_at(generation, generation.position):
            return FinishReason.STOP
        return super()._reason_to_finish(generation)
