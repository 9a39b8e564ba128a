"""The sections of the schema that say how the work is done, from rollout to evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import EngineName, Section, TrainerName, VerifierName

Probability = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


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


class FakeEngine(Section):
    """The fake engine: no model, scripted lengths and speed."""

    lengths: FakeLengths = FakeLengths()
    seconds_per_step: float = Field(default=0.0, ge=0)
    """Seconds that one decode step takes."""
    cost_model: str | None = None
    """File written by `staleflow profile`: steps, prefills and pulls take what it says. Null: see above."""


class Rollout(Section):
    """Generation of trajectories."""

    engine: EngineName = "torch"
    """torch (embedded, Hugging Face models), fake (scripted, no model), or a dotted path to your own."""
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
    fake: FakeEngine = FakeEngine()


class Routing(Section):
    """Which trajectory goes to which instance."""

    strategy: Literal["waterfall", "naive"] | None = None
    """waterfall: largest marginal throughput gain; naive: least loaded. Null: what the policy prescribes."""
    mu: float = Field(default=0.3, ge=0, le=1)
    """μ of waterfall: a trajectory waits for at least this share of its gain on an empty instance."""
    kv_headroom: float = Field(default=0.1, ge=0, lt=1)
    """Share of a KV cache that waterfall and naive leave free, because lengths are only expected ones."""
    max_per_instance: int | None = Field(default=None, ge=1)
    """Most trajectories on an instance under policy strict_queue. Null: rollout.max_running."""


class Synchronization(Section):
    """When an instance pulls newer weights."""

    strategy: Literal["selective", "naive"] | None = None
    """selective: where a pull unlocks routing and pays; naive: all, as soon as there is something newer.
    Null: what the policy prescribes."""


class Migration(Section):
    """When running trajectories move to another instance."""

    strategy: Literal["cost_aware", "naive"] | None = None
    """cost_aware: when the saving exceeds the new prefill; naive: never. Null: what the policy prescribes."""
    phi_wait: int = Field(default=3, ge=0)
    """φ_wait: trajectories that may wait inside an instance before some of them are taken elsewhere."""
    psi_throughput: float = Field(default=5.0, ge=1)
    """ψ: ratio of the fastest to the slowest instance's throughput above which running ones move."""
    rest_s: float = Field(default=2.0, ge=0)
    """Seconds after each Route in which a running trajectory is left alone, whatever a move would save."""


class Stragglers(Section):
    """The last unfinished trajectories that training waits for, when nothing else can be started."""

    action: Literal["wait", "retry", "truncate"] = "wait"
    """wait: let them finish; retry: drop, and sample anew once; truncate: train on what there is. Both of the
    latter cut off long responses, which biases: the report shows by how much. Those shorter than the mean
    response are waited for."""
    at_most: int = Field(default=4, ge=1)
    """Only when no more trajectories than this are unfinished."""


class Coordination(Section):
    """Routing, synchronization and migration of trajectories under the staleness bound."""

    policy: Literal["staleflow", "strict_queue", "strict", "one_step", "sync"] = "staleflow"
    """staleflow; or a baseline in the same system: strict_queue (one central queue with a concurrency cap),
    strict (groups dispatched once), both by batches ahead; one_step (a barrier, one step ahead); sync."""
    interval_ms: float = Field(default=50.0, gt=0)
    """Milliseconds between coordination cycles."""
    cost_model: str | None = None
    """File written by `staleflow profile`. Null: start values, refined during the run."""
    refine_costs: bool = True
    """Fit the cost model anew to what instances report; false: keep the file's, or the start values."""
    routing: Routing = Routing()
    synchronization: Synchronization = Synchronization()
    migration: Migration = Migration()
    stragglers: Stragglers = Stragglers()


class Reward(Section):
    """Scoring of responses, in processes of their own with hard limits."""

    verifier: VerifierName = "exact_match"
    """exact_match, reasoning_gym, math_verify, or the dotted path of your own function."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds after which a verifier call is killed."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes."""
    memory_mb: int = Field(default=1024, ge=64)
    """Memory in MiB that a verifier process may use before it is killed."""
    on_failure: Literal["zero", "mask"] = "zero"
    """A trajectory whose verifier failed (time, memory, crash): zero scores it 0, mask leaves it out."""


class Training(Section):
    """The optimizer, the loss and the correction for staleness."""

    trainer: TrainerName = "torch"
    """torch, or the dotted path of your own trainer."""
    algorithm: Literal["dapo"] = "dapo"
    """Advantages and loss."""
    correction: Literal["tis", "behaviour", "none"] = "tis"
    """tis: clip against weights at the step's start, truncated importance weight for the lag. behaviour: clip
    against behaviour log-probs. none: no correction, only where staleness.bound is 0."""
    learning_rate: float = Field(default=1.5e-4, gt=0)
    """Learning rate of AdamW after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    warmup_steps: int = Field(default=10, ge=0)
    """Training steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates that one batch is split into; together they make one weight version."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most padded tokens, prompt and response, in one forward and backward pass."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight of correction tis."""
    dynamic_sampling: bool = True
    """Drop groups whose raw rewards are all equal, and generate others in their place."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_new_tokens over which the penalty grows linearly. 0: no penalty."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Taken off the shaped reward of a response that uses the whole budget."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer."""


class Evaluation(Section):
    """Accuracy on a fixed held-out set, greedy and sampled, each time on one weight version."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; the first and the last version are evaluated too. 0: none."""
    prompts: int = Field(default=512, ge=1)
    """Held-out prompts."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response. Null: rollout.max_new_tokens."""
