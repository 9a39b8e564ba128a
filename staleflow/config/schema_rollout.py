"""The section `rollout` of the schema: engines and generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from staleflow.config.base import EngineName, Section

Probability = Annotated[float, Field(gt=0, le=1)]


class FakeLengths(Section):
    """Lengths of the fake engine's scripted responses, in tokens."""

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    """fixed: always mean; uniform: from min to max; lognormal: long-tailed, cut off at max."""
    mean: float = Field(default=32.0, gt=0)
    """The length (fixed), or the median length (lognormal)."""
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm of the length (lognormal)."""
    min: int = Field(default=1, ge=1)
    """Shortest length (uniform)."""
    max: int = Field(default=96, ge=1)
    """Longest length (uniform, lognormal)."""


class FakeEngineConfig(Section):
    """The fake engine: no model, scripted lengths and speed."""

    lengths: FakeLengths = FakeLengths()
    seconds_per_step: float = Field(default=0.0, ge=0)
    """Seconds per decode step."""
    cost_model: str | None = None
    """File written by `staleflow profile` that sets the time of steps, prefills and pulls. Null:
    seconds_per_step."""


class Vllm(Section):
    """The vLLM engine. On a CPU, rollout.kv_capacity_tokens sets the size of its KV cache."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on a CPU: processes) of one instance, each with a part of every layer."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs. Null: true on a CPU, where they cost more than they save."""
    prefix_caching: bool = True
    """Share the KV of common prefixes. KV from other weights is never reused."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, by name."""


class Rollout(Section):
    """Generation of trajectories."""

    engine: EngineName = "torch"
    """torch (embedded), vllm, fake (scripted, no model), or a dotted path to your own."""
    instances: int = Field(default=2, ge=1)
    """Rollout instances, each with its own weight version."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Most tokens of one response, over all interruptions and turns."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response together. Null: the limit in the model's config."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs are computed at this temperature, in the trainer too."""
    top_p: Probability = 1.0
    """Nucleus sampling. Training requires 1 (off)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens. Training requires 0 (no limit)."""
    on_pull: Literal["recompute", "keep_kv"] = "recompute"
    """KV of running trajectories at a pull. recompute: rebuild it under the new weights; keep_kv: keep it."""
    kv_capacity_tokens: int = Field(default=8192, ge=1)
    """Capacity of one instance's KV cache, in tokens."""
    max_running: int = Field(default=96, ge=1)
    """Most trajectories that one instance decodes at the same time."""
    progress_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between reports of unfinished trajectories: at most this much work is lost with an instance."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """Seconds of silence after which an instance counts as lost and its work moves to others."""
    max_retries: int = Field(default=3, ge=0)
    """Number of times that a failed trajectory is generated again before it is masked."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each instance."""
    vllm: Vllm = Vllm()
    fake: FakeEngineConfig = FakeEngineConfig()
