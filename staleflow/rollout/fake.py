"""The fake engine: the torch engine's scheduling around tokens that are computed by a formula.

A public, supported engine: for tests of everything above the engine, for dry runs, and for measuring what
the system itself costs. It schedules with the same code as the torch engine (KV budget, preemption,
budgets, version stamps); only what a token *is* differs:

- token of trajectory t at response position p: `fake_token`, a function of (seed, t, p) alone, never a stop
  token (that of a greedy trajectory is the smallest id which is none); at the scripted length (`lengths.py`)
  it is the first stop token;
- log-prob: `fake_log_prob`, which tells the weights that drew it *and* those that filled the KV it was
  drawn from, so that a stale cache is visible in the numbers;
- time: each step and each pull spends what the cost model says through the injected `spend`, by default none.

Failures are scripted, and counted from the engine's start: see `FakeScript`.
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
    """Log-prob (nats, below 0): a random part in multiples of 1/64 that weights do not touch, and theirs.

    -(1 + floor(64 u) / 64) - version / 2**10 - kv_version / 2**16, with u the number of trajectory id
    + "/log_prob" at `position`. Exact in float32 for versions from 0 to 15, in which the parts can be told
    apart; beyond they overlap but still differ.
    """
    number = uniform(trajectory_key(seed, f"{trajectory_id}/log_prob"), position)
    return -(1 + int(64 * number) / 64) - version / 2**10 - kv_version / 2**16


EIGHT_TOKENS = fixed(8)


def wait_for_ever() -> None:
    """Never return. A function of this module, so that a script can be sent to another process."""
    threading.Event().wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """Failures to play. Steps are counted from 1; steps with nothing to decode count too."""

    fail_at_step: int | None = None
    """This step, and every later one, raises EngineError before anything changes."""
    hang_at_step: int | None = None
    """This step calls `hang` first."""
    hang: Callable[[], object] = wait_for_ever
    refuse_loads: int = 0
    """The first so many `load_weights` raise EngineError and keep the old version."""
    lose: frozenset[str] = frozenset()
    """Trajectories that are accepted and vanish, once each: no result ever comes."""
    freeze: frozenset[str] = frozenset()
    """Trajectories that stay running and never gain a token."""


class FakeEngine(BatchingEngine):
    """Engine with scripted lengths, speed and failures.

    `lengths` counts the stop token in; the budget may end a trajectory earlier. Without stop tokens in
    `sampling`, a trajectory still finishes with STOP at its scripted length. `seconds_per_step`: a number
    or a cost model, whose seconds go to `spend` (a sleep, or a virtual clock's advance) before the tokens of
    a step come out, and before a pull ends.
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
            raise EngineError(f"a vocabulary of {vocab_size} tokens has none that is not a stop token")
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
        self._entered = 0  # tokens whose KV was built and has not been paid for in time yet
        self._end: dict[str, int] = {}  # response position just after the last token of the turn
        self._kv_version: dict[str, int] = {}

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory, unless it is scripted to get lost."""
        if trajectory.trajectory_id in self._to_lose:
            self._check_open()
            self._to_lose.remove(trajectory.trajectory_id)
            return
        super().add(trajectory, greedy=greedy)

    def step(self) -> Sequence[Trajectory]:
        """One decode step, or the failure scripted for it."""
        self._steps += 1
        if self._script.hang_at_step == self._steps:
            self._script.hang()
        if self._script.fail_at_step is not None and self._steps >= self._script.fail_at_step:
            raise EngineError(f"scripted failure at step {self._steps}")
        return super().step()

    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """Take the version; the tensors are not looked at. Raises EngineError as scripted."""
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
