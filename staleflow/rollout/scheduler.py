"""Admission and preemption: the rules shared by all batching engines.

Invariants:

- before a decode step, `sum(length + 1)` over the running trajectories is at most the KV capacity: the
  tokens held plus the one that each is about to gain;
- waiting trajectories are admitted in the order of arrival and none overtakes another, so that short ones
  cannot starve a long one;
- a running trajectory is preempted only in favour of older ones, keeps its tokens, and returns first; the
  oldest is never preempted, since it always fits alone, so decoding always progresses;
- `max_model_len`, the trajectory's own budget and the KV capacity all bound its length; at the bound it
  finishes with LENGTH, and one that arrives at its bound finishes at the next step without a new token.

The scheduler knows only lengths; the engine owns the KV cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import EngineError


class Generation:
    """One trajectory while an engine holds it: its original state and the tokens gained since."""

    __slots__ = ("bound", "greedy", "log_probs", "order", "origin", "tokens", "versions")

    def __init__(self, trajectory: Trajectory, *, bound: int, order: int, greedy: bool = False) -> None:
        self.origin = trajectory
        self.greedy = greedy
        """Always take the most likely token."""
        self.tokens: list[int] = [*trajectory.prompt.tokens, *trajectory.tokens.tolist()]
        """Prompt and response ids, including new ones."""
        self.log_probs: list[float] = []
        """Of the new tokens only, like `versions`."""
        self.versions: list[int] = []
        self.bound = bound
        """Length (prompt and response) at which it finishes with LENGTH."""
        self.order = order
        """Arrival number in this engine: smaller is older."""

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory."""
        return self.origin.trajectory_id

    @property
    def length(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Response position of the next token, counted from 0."""
        return len(self.tokens) - len(self.origin.prompt.tokens)

    def append(self, token: int, log_prob: float, version: int) -> None:
        """Append one generated token."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    def trajectory(self, reason: FinishReason | None = None) -> Trajectory:
        """The trajectory with all its tokens so far."""
        gained = len(self.log_probs)
        segment = Segment(
            generated=True,
            tokens=np.asarray(self.tokens[len(self.tokens) - gained :], dtype=np.int32),
            log_probs=np.asarray(self.log_probs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
        )
        return self.origin.extended(segment).finished(reason)


def accepted(
    trajectory: Trajectory, *, kv_capacity: int, max_model_len: int, order: int, greedy: bool = False
) -> tuple[Generation, bool]:
    """The trajectory as an engine of that size holds it, and whether its budget is already used up.

    Raises EngineError if such an engine can never continue it.
    """
    identity = trajectory.trajectory_id
    if trajectory.finish_reason is not None:
        raise EngineError(f"trajectory {identity} has already finished ({trajectory.finish_reason})")
    if not trajectory.prompt.tokens:
        raise EngineError(f"trajectory {identity} has an empty prompt")
    allowed = min(max_model_len, len(trajectory.prompt.tokens) + trajectory.max_new_tokens)
    spent = trajectory.length >= allowed
    if not spent and trajectory.length + 1 > kv_capacity:
        raise EngineError(
            f"trajectory {identity} has {trajectory.length} tokens and cannot gain one more "
            f"in a KV cache of {kv_capacity} tokens"
        )
    return Generation(trajectory, bound=min(allowed, kv_capacity), order=order, greedy=greedy), spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Changes to apply before one decode step."""

    preempted: tuple[Generation, ...]
    """Moved back to waiting; drop their KV."""
    admitted: tuple[Generation, ...]
    """Now running; build their KV."""
    spent: tuple[Generation, ...]
    """Arrived without budget left; finished with LENGTH and forgotten."""


class Scheduler:
    """Queues of one engine.

    `kv_capacity` in tokens, `max_running` in trajectories, `max_model_len` in tokens of prompt and response.
    """

    def __init__(self, *, kv_capacity: int, max_running: int, max_model_len: int) -> None:
        if kv_capacity < 2 or max_running < 1 or max_model_len < 1:
            raise EngineError(
                f"an engine needs kv_capacity >= 2, max_running >= 1 and max_model_len >= 1; "
                f"got {kv_capacity}, {max_running} and {max_model_len}"
            )
        self.kv_capacity = kv_capacity
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.preemptions = 0
        self._arrivals = 0
        self._spent: list[Generation] = []
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []  # oldest first
        self._held: dict[str, Generation] = {}

    @property
    def running(self) -> Sequence[Generation]:
        """Running trajectories, oldest first."""
        return self._running

    @property
    def waiting_count(self) -> int:
        """Trajectories held without KV."""
        return len(self._waiting) + len(self._spent)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the running trajectories."""
        return sum(g.length for g in self._running)

    @property
    def held(self) -> Iterable[Generation]:
        """All trajectories held, in order of arrival."""
        return self._held.values()

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory. Raises EngineError, changing nothing, if this engine can never continue it."""
        identity = trajectory.trajectory_id
        if identity in self._held:
            raise EngineError(f"trajectory {identity} is already in this engine")
        generation, spent = accepted(
            trajectory,
            kv_capacity=self.kv_capacity,
            max_model_len=self.max_model_len,
            order=self._arrivals,
            greedy=greedy,
        )
        self._arrivals += 1
        self._held[identity] = generation
        (self._spent if spent else self._waiting).append(generation)

    def schedule(self) -> Schedule:
        """Make room for the next decode step, or fill the free room."""
        spent, self._spent = tuple(self._spent), []
        for generation in spent:
            del self._held[generation.trajectory_id]
        preempted = self._make_room()
        # A trajectory just preempted would be admitted first, and it does not fit.
        admitted = () if preempted else self._fill()
        return Schedule(preempted=preempted, admitted=admitted, spent=spent)

    def _make_room(self) -> tuple[Generation, ...]:
        preempted = []
        needed = self.kv_tokens + len(self._running)
        while needed > self.kv_capacity:
            youngest = self._running.pop()
            needed -= youngest.length + 1
            self._waiting.appendleft(youngest)
            preempted.append(youngest)
        self.preemptions += len(preempted)
        return tuple(preempted)

    def _fill(self) -> tuple[Generation, ...]:
        admitted = []
        needed = self.kv_tokens + len(self._running)
        while self._waiting and len(self._running) < self.max_running:
            needed += self._waiting[0].length + 1
            if needed > self.kv_capacity:
                break
            # Admission is in order of arrival and the preempted return first: `running` stays oldest first.
            generation = self._waiting.popleft()
            self._running.append(generation)
            admitted.append(generation)
        return tuple(admitted)

    def remove(self, trajectory_ids: Iterable[str]) -> tuple[list[Generation], list[Generation]]:
        """Forget trajectories. Returns (all that were held, those of them that were running)."""
        gone = [self._held.pop(i) for i in dict.fromkeys(trajectory_ids) if i in self._held]
        if not gone:
            return [], []
        orders = {g.order for g in gone}
        were_running = [g for g in self._running if g.order in orders]
        self._running = [g for g in self._running if g.order not in orders]
        self._waiting = deque(g for g in self._waiting if g.order not in orders)
        self._spent = [g for g in self._spent if g.order not in orders]
        return gone, were_running
