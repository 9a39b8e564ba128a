"""The section `simulation`: the machines that `staleflow simulate` and `staleflow plan` reckon with.

Everything else that a simulated run needs (staleness, batches, policy, redundancy, lengths' limit, steps,
seed) is said by the keys of a real run.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import Section

Share = Annotated[float, Field(gt=0, le=1)]


class SimulatedLengths(Section):
    """How long simulated responses are, in tokens; all are cut at rollout.max_new_tokens."""

    kind: Literal["lognormal", "bimodal", "fixed", "replay"] = "lognormal"
    """lognormal: long-tailed; bimodal: short and long prompts; fixed: all median; replay: as recorded."""
    median: float | None = Field(default=None, gt=0)
    """Median (lognormal), the length (fixed). Null: a quarter of rollout.max_new_tokens."""
    sigma: float = Field(default=0.8, ge=0)
    """Deviation of the logarithm of the length (lognormal; of each mode, bimodal)."""
    correlation: float = Field(default=0.5, ge=0, le=1)
    """Share of that variance which the trajectories of a group have in common (lognormal)."""
    truncated: float = Field(default=0.02, ge=0, le=1)
    """Share of responses that never end by themselves, beside those of the tail (lognormal)."""
    short: float = Field(default=500.0, gt=0)
    """Median of the short prompts' responses (bimodal)."""
    long: float = Field(default=8000.0, gt=0)
    """Median of the long prompts' responses (bimodal)."""
    long_share: float = Field(default=0.3, ge=0, le=1)
    """Share of prompts with long responses (bimodal)."""
    path: str | None = None
    """Folder of a run with a journal, whose response lengths are drawn from (replay)."""


class Efficiency(Section):
    """Shares of the hardware's peak that are reached in practice, and what is lost outside of them."""

    memory_bandwidth: Share = 0.8
    """Of the memory bandwidth, when weights and KV are read."""
    decode_compute: Share = 0.6
    """Of the FLOPs, in decode steps."""
    prefill_compute: Share = 0.5
    """Of the FLOPs, when KV is built."""
    training_compute: Share = 0.4
    """Of the FLOPs, in training: model FLOPs utilization."""
    kv_memory: Share = 0.9
    """Of an instance's memory that weights and KV may take; the rest is activations and buffers."""
    training_memory: Share = 0.8
    """Of the training GPUs' memory that weights, gradients and optimizer may take; the rest is
    activations."""
    network: Share = 0.8
    """Of the bandwidth between GPUs and between nodes."""
    step_overhead_s: float = Field(default=0.002, ge=0)
    """Seconds of a decode step in which no GPU computes: scheduling, sampling, launching."""
    all_reduce_s: float = Field(default=10e-6, ge=0)
    """Seconds that one all-reduce between the GPUs of an instance takes beside its data; two a layer."""


class Latencies(Section):
    """Time that passes between the parts, in seconds."""

    command_s: float = Field(default=0.005, ge=0)
    """From a decision of the coordinator to the instance."""
    report_s: float = Field(default=0.005, ge=0)
    """From an instance to the coordinator."""
    progress_interval_s: float = Field(default=30.0, gt=0)
    """Between reports of the lengths of running trajectories: in place of rollout.progress_interval_s."""
    reward_s: float = Field(default=0.1, ge=0)
    """To score one response."""
    reward_workers: int | None = Field(default=None, ge=1)
    """Responses scored at the same time. Null: any number."""
    push_s: float = Field(default=0.5, ge=0)
    """Of a push, beside its transfer."""
    pull_s: float = Field(default=0.5, ge=0)
    """Of a pull, beside its transfer and the rebuilding of KV."""
    switch_s: float = Field(default=5.0, ge=0)
    """Policy sync has all GPUs for both phases: to change from one to the other."""


class SimulatedTraining(Section):
    """What a training step takes."""

    logprob_passes: int = Field(default=1, ge=0)
    """Forward passes over a batch before its update, for log-probs of weights at the step's start."""
    overhead_s: float = Field(default=2.0, ge=0)
    """Seconds of a step beside passes, optimizer and push: advantages, batching, starting."""
    fixed_s: float | None = Field(default=None, ge=0)
    """Seconds of a step without its tokens. Null: from model and GPUs."""
    token_s: float | None = Field(default=None, ge=0)
    """Seconds per token of prompts and responses. Null: from model and GPUs."""
    push_s: float | None = Field(default=None, ge=0)
    """Seconds of a push. Null: from model and GPUs."""


class SimulatedOutage(Section):
    """An instance that dies."""

    at: float = Field(ge=0)
    """Seconds from the start."""
    instance: int = Field(ge=0)
    """Which one, counted from 0."""
    down_s: float | None = Field(default=None, ge=0)
    """Seconds until it is back. Null: never."""


class SimulatedSlowdown(Section):
    """An instance that becomes slow."""

    at: float = Field(ge=0)
    """Seconds from the start."""
    instance: int = Field(ge=0)
    """Which one, counted from 0."""
    factor: float = Field(gt=0)
    """Everything on it takes so many times as long from then on. 1: as it should."""


class Simulation(Section):
    """The cluster that `staleflow simulate` and `staleflow plan` reckon with; a real run does not read it."""

    model: str = Field(default="qwen2.5-14b", min_length=1)
    """qwen2.5-7b, qwen2.5-14b, qwen2.5-32b, qwen3-30b-a3b, or a folder with a Hugging Face config.json."""
    gpu: Literal["H20", "H100", "H200", "A100"] = "H20"
    """Kind of all GPUs."""
    rollout_gpus: int = Field(default=16, ge=1)
    """GPUs that generate: rollout_gpus / tensor_parallel instances (rollout.instances is not read)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one rollout instance."""
    training_gpus: int = Field(default=48, ge=1)
    """GPUs that train."""
    costs: str | None = None
    """File written by `staleflow profile`: instances cost what it says, and rollout.instances,
    rollout.kv_capacity_tokens and simulation.training say the rest. Null: from model and GPUs."""
    prompt_tokens: int = Field(default=1024, ge=1)
    """Tokens of each prompt."""
    solved: float | None = Field(default=None, ge=0, le=1)
    """Share of responses with reward 1, drawn by chance, the others 0. Null: no group is filtered."""
    lengths: SimulatedLengths = SimulatedLengths()
    efficiency: Efficiency = Efficiency()
    latencies: Latencies = Latencies()
    training: SimulatedTraining = SimulatedTraining()
    outages: Annotated[tuple[SimulatedOutage, ...], Strict(False)] = ()
    """Instances that die: a list of {at, instance, down_s}."""
    slowdowns: Annotated[tuple[SimulatedSlowdown, ...], Strict(False)] = ()
    """Instances that become slow: a list of {at, instance, factor}."""
