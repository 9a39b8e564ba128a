"""The section `rollout` of the schema: engines, and how they generate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from staleflow.config.base import EngineName, Section

Probability = Annotated[float, Field(gt=0, le=1)]


class FakeLengths(Section):
    """How long the scripted responses of the fake engine are, in tokens."""

    kind: Literal["fixed", "uniform", "lognormal"] = "fixed"
    """fixed: always mean; uniform: from min to max; lognormal: long-tailed, cut at max."""
    mean: float = Field(default=32.0, gt=0)
    """The length (fixed), or the median length (lognormal)."""
    sigma: float = Field(default=1.0, ge=0)
    """Deviation of the logarithm of the length (lognormal)."""
    min: int = Field(default=1, ge=1)
    """Shortest length (uniform)."""
    max: int = Field(default=96, ge=1)
    """Longest length (uniform, lognormal)."""


class FakeEngineConfig(Section):
    """The fake engine: no model, scripted lengths and speed."""

    lengths: FakeLengths = FakeLengths()
    seconds_per_step: float = Field(default=0.0, ge=0)
    """Seconds that one decode step takes."""
    cost_model: str | None = None
    """File written by `staleflow profile`: steps, prefills and pulls take what it says. Null: see above."""


class Vllm(Section):
    """The vLLM engine. On a CPU rollout.kv_capacity_tokens decides the size of its KV cache."""

    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (without: processes) of one instance, each with a part of every layer."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that weights and KV cache take."""
    enforce_eager: bool | None = None
    """Do without compiling and CUDA graphs. Null: on a CPU, where they take longer than they save."""
    prefix_caching: bool = True
    """Share the KV of common prefixes; what other weights computed is never served."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, by their names."""


class Rollout(Section):
    """Generation of trajectories."""

    engine: EngineName = "torch"
    """torch (embedded), vllm, fake (scripted, no model), or a dotted path to your own."""
    instances: int = Field(default=2, ge=1)
    """Rollout instances, each with its own weight version."""
    max_new_tokens: int = Field(default=48, ge=1)
    """Most tokens of one response, over all interruptions and turns."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response together. Null: what the model's own config allows."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs are those at this temperature, in the trainer too."""
    top_p: Probability = 1.0
    """Nucleus sampling. 1: off, which training needs."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens to draw from. 0: no limit, which training needs."""
    on_pull: Literal["recompute", "keep_kv"] = "recompute"
    """What a pull does to running trajectories: rebuild their KV under new weights, or keep the old KV."""
    kv_capacity_tokens: int = Field(default=8192, ge=1)
    """Tokens that the KV cache of one instance holds."""
    max_running: int = Field(default=96, ge=1)
    """Most trajectories that one instance decodes at the same time."""
    progress_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between reports of unfinished trajectories; a lost instance loses at most so much work."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """Seconds of silence after which an instance counts as lost, and its work goes elsewhere."""
    max_retries: int = Field(default=3, ge=0)
    """How often a failed trajectory is generated anew before it is masked."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each instance."""
    vllm: Vllm = Vllm()
    fake: FakeEngineConfig = FakeEngineConfig()
