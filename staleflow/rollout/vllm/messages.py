"""What the engine and the process that holds vLLM say to each other.

Invariants: one pipe carries everything, in order, so that whatever was said before an update is about the
weights before it; a trajectory is called by the number of its arrival; only small values travel, no weights.

::

    engine  --EngineSetup, Add, Remove, DecodeStep, WeightUpdate, Close-->  host
            <--Ready | Refused, Stepped, Removed, Updated, Broken--

Each DecodeStep is answered by one Stepped. Further Stepped may come before Updated: steps that rebuilt KV.
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
    """Most tokens of prompt and response together."""
    kv_capacity_tokens: int
    """Decides the size of the KV cache on a CPU; on a GPU the memory does."""
    max_running: int
    gpu_memory_utilization: float
    tensor_parallel: int
    enforce_eager: bool | None
    """None: on a CPU, where compiling takes longer than it saves."""
    prefix_caching: bool
    options: dict[str, Any]
    """Further arguments of vLLM's EngineArgs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """vLLM is up, with weights that mean nothing yet."""

    kv_capacity: int
    """Tokens that the KV cache holds."""
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The EngineSetup, or a WeightUpdate that has changed nothing, cannot be done."""

    reason: str
    blame_user: bool = False
    """The settings are at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The host ends: what it held is lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """A trajectory to go on with."""

    number: int
    tokens: list[int]
    """Prompt and response so far."""
    max_tokens: int
    """New ones at most; at least 1."""
    seed: int
    sampling: SamplingParams
    """Its `max_model_len` is not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Trajectories to forget."""

    numbers: tuple[int, ...]
    answer: bool
    """Say Removed: nothing more comes of them."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Every Stepped of before has been said."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode one step."""


class Gain(NamedTuple):
    """What a trajectory gained in a step."""

    number: int
    tokens: list[int]
    log_probs: list[float]
    cached: int
    """Tokens that a trajectory which joined found in the prefix cache."""
    ended: Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step is done."""

    version: int
    """Weights that all its tokens were drawn with."""
    gains: list[Gain]
    preempted: list[int]
    """Lost their KV to others, or to an update; they wait."""
    seconds: float = 0.0
    """It took."""
    rebuilding: bool = False
    """Part of an update: it does not answer a DecodeStep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAt:
    """Where each worker finds a weight version."""

    version: int
    handle: Handle | None
    """To lease the version from."""
    file: str | None
    """Else: a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Swap the weights."""

    weights: WeightsAt
    on_pull: OnPull


@dataclass(frozen=True, slots=True)
class Updated:
    """The new weights are at work, in all tokens from here on."""


@dataclass(frozen=True, slots=True)
class Close:
    """End in good order."""
