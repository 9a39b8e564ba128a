"""The section `simulation`: the machines of `staleflow simulate` and `staleflow plan`.

All other settings of a simulated run (staleness, batches, policy, redundancy, most tokens, steps, seed) are
the keys of a real run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]


class SimulatedLengths(Section):
    """Lengths of simulated responses, in tokens; all are cut off at rollout.max_new_tokens."""

    kind: Literal["lognormal", "bimodal", "fixed", "replay"] = "lognormal"
    """lognormal: long-tailed; bimodal: short and long prompts; fixed: always median; replay: as recorded."""
    median: float | None = Field(default=None, gt=0)
    """Median (lognormal), or the length (fixed). Null: a quarter of rollout.max_new_tokens."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of the logarithm of the length (lognormal; of each mode for bimodal)."""
    correlation: float = Field(default=0.5, ge=0, le=1)
    """Share of that variance that the trajectories of a group have in common (lognormal)."""
    truncated: float = Field(default=0.02, ge=0, le=1)
    """Share of responses that never end by themselves, in addition to the tail (lognormal)."""
    short: float = Field(default=500.0, gt=0)
    """Median length of responses to short prompts (bimodal)."""
    long: float = Field(default=8000.0, gt=0)
    """Median length of responses to long prompts (bimodal)."""
    long_share: float = Field(default=0.3, ge=0, le=1)
    """Share of prompts with long responses (bimodal)."""
    path: str | None = None
    """Folder of a run with a journal, which provides the response lengths (replay)."""


class Efficiency(Section):
    """Shares of the hardware's peak reached in practice, and fixed overheads."""

    memory_bandwidth: Share = 0.8
    """Share of the memory bandwidth when reading weights and KV."""
    decode_compute: Share = 0.6
    """Share of the peak FLOPs in decode steps."""
    prefill_compute: Share = 0.5
    """Share of the peak FLOPs in prefill."""
    training_compute: Share = 0.4
    """Share of the peak FLOPs in training (model FLOPs utilization)."""
    kv_memory: Share = 0.9
    """Share of an instance's memory for weights and KV; the rest is activations and buffers."""
    training_memory: Share = 0.8
    """Share of the training GPUs' memory for weights, gradients and optimizer; the rest is activations."""
    network: Share = 0.8
    """Share of the bandwidth between GPUs and between nodes."""
    step_overhead_s: float = Field(default=0.002, ge=0)
    """Seconds per decode step in which no GPU computes: scheduling, sampling, launching."""
    all_reduce_s: float = Field(default=10e-6, ge=0)
    """Latency in seconds of one all-reduce between the GPUs of an instance; there are two per layer."""


class Latencies(Section):
    """Delays between the parts."""

    command_s: float = Field(default=0.005, ge=0)
    """Seconds from a decision of the coordinator to the instance."""
    report_s: float = Field(default=0.005, ge=0)
    """Seconds from an instance to the coordinator."""
    progress_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between reports of running trajectories' lengths; replaces rollout.progress_interval_s."""
    reward_s: float = Field(default=0.1, ge=0)
    """Seconds to score one response."""
    reward_workers: int | None = Field(default=None, ge=1)
    """Responses scored at the same time. Null: unlimited."""
    push_s: float = Field(default=0.5, ge=0)
    """Seconds of a push in addition to its transfer."""
    pull_s: float = Field(default=0.5, ge=0)
    """Seconds of a pull in addition to its transfer and the rebuilding of KV."""
    switch_s: float = Field(default=5.0, ge=0)
    """Seconds in which policy sync switches all GPUs between generation and training."""


class SimulatedTraining(Section):
    """Duration of a training step."""

    logprob_passes: int = Field(default=1, ge=0)
    """Forward passes over a batch before its update, for log-probs under the weights at the step's start."""
    overhead_s: float = Field(default=2.0, ge=0)
    """Seconds of a step outside passes, optimizer and push: advantages, batching, startup."""
    fixed_s: float | None = Field(default=None, ge=0)
    """Seconds per step, apart from its tokens. Null: computed from model and GPUs."""
    token_s: float | None = Field(default=None, ge=0)
    """Seconds per token of prompts and responses. Null: computed from model and GPUs."""
    push_s: float | None = Field(default=None, ge=0)
    """Seconds of a push. Null: computed from model and GPUs."""


class SimulatedOutage(Section):
    """An instance that dies."""

    at: float = Field(ge=0)
    """Seconds from the start."""
    instance: int = Field(ge=0)
    """Index of the instance, from 0."""
    down_s: float | None = Field(default=None, ge=0)
    """Seconds until it returns. Null: never."""


class SimulatedSlowdown(Section):
    """An instance that becomes slow."""

    at: float = Field(ge=0)
    """Seconds from the start."""
    instance: int = Field(ge=0)
    """Index of the instance, from 0."""
    factor: float = Field(gt=0)
    """All its work takes this many times as long from then on. 1: normal speed."""


class Simulation(Section):
    """The cluster of `staleflow simulate` and `staleflow plan`; a real run ignores this section."""

    model: str = Field(default="qwen2.5-14b", min_length=1)
    """qwen2.5-7b, qwen2.5-14b, qwen2.5-32b, qwen3-30b-a3b, or a folder with a Hugging Face config.json."""
    gpu: Literal["H20", "H100", "H200", "A100"] = "H20"
    """Type of all GPUs."""
    rollout_gpus: int = Field(default=16, ge=1)
    """GPUs that generate, as rollout_gpus / tensor_parallel instances (rollout.instances is ignored)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one rollout instance."""
    training_gpus: int = Field(default=48, ge=1)
    """GPUs that train."""
    costs: str | None = None
    """File written by `staleflow profile` that sets the costs of an instance; rollout.instances,
    rollout.kv_capacity_tokens and simulation.training set the rest. Null: computed from model and GPUs."""
    prompt_tokens: int = Field(default=1024, ge=1)
    """Tokens of each prompt."""
    solved: float | None = Field(default=None, ge=0, le=1)
    """Probability that a response has reward 1; otherwise 0. Null: no group is filtered."""
    lengths: SimulatedLengths = SimulatedLengths()
    efficiency: Efficiency = Efficiency()
    latencies: Latencies = Latencies()
    training: SimulatedTraining = SimulatedTraining()
    outages: Annotated[tuple[SimulatedOutage, ...], Strict(False)] = ()
    """Instances that die: a list of {at, instance, down_s}."""
    slowdowns: Annotated[tuple[SimulatedSlowdown, ...], Strict(False)] = ()
    """Instances that become slow: a list of {at, instance, factor}."""
