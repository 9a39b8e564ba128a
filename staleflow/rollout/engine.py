"""The engine interface: what a rollout instance needs from a token generator.

Invariants of every engine:

- each generated token carries the version of the weights that produced it; only the engine stamps it;
- log-probs are those of the distribution sampled from (temperature included);
- `interrupt` loses no tokens, and a trajectory never exceeds its own token budget;
- the random number of a token depends on (run seed, trajectory id, token position) alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from staleflow.data.trajectory import Segment, Trajectory

OnPull = Literal["recompute", "keep_kv"]
"""What a pull does to running trajectories: rebuild their KV under the new weights, or keep the old KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; one set per engine."""

    temperature: float = 1.0
    """0 is greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop_token_ids: tuple[int, ...] = ()
    max_model_len: int = 4096
    """Limit on the tokens of prompt and response together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Current contents and cumulative counts of an engine."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    preemptions: int
    """Since the start: how often a running trajectory went back to waiting because the KV cache was full."""
    generated_tokens: int
    """Since the start."""
    decode_steps: int
    """Steps since the start that decoded something; the sums below are over these steps."""
    running_steps: int
    """Sum of the number of trajectories decoded."""
    kv_token_steps: int
    """Sum of the tokens of those trajectories, before each step adds its own."""
    prefilled_tokens: int
    """Tokens of the trajectories that joined, and had their KV built, in those steps."""
    decode_seconds: float | None = None
    """Time of those steps, from an engine that decodes in the background. None: use the time of `step`."""


class Engine(Protocol):
    """Continuous batching over trajectories that join and leave at any decode step."""

    @property
    def version(self) -> int:
        """Weight version loaded."""
        ...

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory; it starts, or continues from its tokens, as soon as the KV cache has room.

        `greedy`: it always takes the most likely token, as at temperature 0, whatever the engine's
        temperature, top-p and top-k; its log-probs are those at temperature 1. This holds over pulls and
        preemptions, until the trajectory leaves; after an interrupt, pass `greedy` again.
        Raises EngineError if it can never fit (its prompt alone exceeds the KV capacity).
        """
        ...

    def step(self) -> Sequence[Trajectory]:
        """One decode step for all running trajectories. Returns those that finished, and forgets them."""
        ...

    def interrupt(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories, tokens kept. Unknown ids (finished meanwhile) are skipped."""
        ...

    def abort(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories whose tokens are no longer needed. Unknown ids are skipped."""
        ...

    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """Swap weights in place; running trajectories stay. `tensors` are valid only during the call."""
        ...

    def trajectories(self) -> Mapping[str, Trajectory]:
        """All trajectories held, running or waiting, with their tokens so far."""
        ...

    def load(self) -> EngineLoad:
        """Counts for the snapshot."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


def segment_after(trajectory: Trajectory, seen: int) -> Segment:
    """The response tokens of `trajectory` from position `seen` on, as one generated segment.

    An engine only appends generated tokens to a trajectory, so one segment suffices.
    """
    return Segment(
        generated=True,
        tokens=np.ascontiguousarray(trajectory.tokens[seen:]),
        log_probs=np.ascontiguousarray(trajectory.log_probs[seen:]),
        versions=np.ascontiguousarray(trajectory.versions[seen:]),
    )
