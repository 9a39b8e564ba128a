"""Messages between the engine and the process that holds vLLM.

Invariants: one pipe carries all messages in order, so everything sent before an update refers to the weights
before it; a trajectory is identified by its arrival number; messages are small and contain no weights.

::

    engine  --EngineSetup, Add, Remove, DecodeStep, WeightUpdate, Close-->  host
            <--Ready | Refused, Stepped, Removed, Updated, Broken--

One Stepped answers each DecodeStep. Further Stepped may precede Updated: steps that rebuilt KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from staleflow.rollout.engine import OnPull, SamplingParams
from staleflow.servers.transport import Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The engine to build."""

    model: str
    """Folder with the model's config.json; its weights are not read."""
    dtype: str
    max_model_len: int
    """Limit on the tokens of prompt and response together."""
    kv_capacity_tokens: int
    """Size of the KV cache on a CPU; on a GPU its memory decides."""
    max_running: int
    gpu_memory_utilization: float
    tensor_parallel: int
    enforce_eager: bool | None
    """None: true on a CPU, where compiling takes longer than it saves."""
    prefix_caching: bool
    options: dict[str, Any]
    """Further arguments of vLLM's EngineArgs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """vLLM is up, with random weights."""

    kv_capacity: int
    """Capacity of the KV cache in tokens."""
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The EngineSetup or a WeightUpdate was refused; a refused WeightUpdate changed nothing."""

    reason: str
    blame_user: bool = False
    """True if the settings are at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The host ends; its state is lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Start or continue a trajectory."""

    number: int
    tokens: list[int]
    """Prompt and response so far."""
    max_tokens: int
    """Limit on new tokens; at least 1."""
    seed: int
    sampling: SamplingParams
    """Its `max_model_len` is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Forget trajectories."""

    numbers: tuple[int, ...]
    answer: bool
    """Answer with Removed: no more tokens of these trajectories follow."""


@dataclass(frozen=True, slots=True)
class Removed:
    """All earlier Stepped have been sent."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode one step."""


class Gain(NamedTuple):
    """Tokens that one trajectory gained in a step."""

    number: int
    tokens: list[int]
    log_probs: list[float]
    cached: int
    """Tokens that a newly joined trajectory found in the prefix cache."""
    ended: Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step is done."""

    version: int
    """Weight version of all its tokens."""
    gains: list[Gain]
    preempted: list[int]
    """Trajectories that lost their KV to others, or to an update, and now wait."""
    seconds: float = 0.0
    """Duration."""
    rebuilding: bool = False
    """Part of an update, not an answer to a DecodeStep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAt:
    """Where each worker finds a weight version."""

    version: int
    handle: Handle | None
    """Where to lease the version."""
    file: str | None
    """Without a handle: a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Swap the weights."""

    weights: WeightsAt
    on_pull: OnPull


@dataclass(frozen=True, slots=True)
class Updated:
    """The new weights are loaded; all later tokens come from them."""


@dataclass(frozen=True, slots=True)
class Close:
    """Shut down cleanly."""
