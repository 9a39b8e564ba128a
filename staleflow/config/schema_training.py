"""The section `training` of the schema: optimizer, loss, and correction for staleness."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import AlgorithmName, Section, TrainerName

Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=0)]


class Kl(Section):
    """Holding the policy near a reference model; read by every algorithm."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference, per token and nat. 0: there is no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of a token: k1 log-ratio, k2 half its square, k3 unbiased and never negative."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: taken off the reward of each token."""
    reference: str | None = None
    """Folder of the reference model, as model.source. Null: the weights that the run starts from."""


class CriticModel(Section):
    """What PPO expects before each token; read by algorithms with a critic only."""

    source: str | None = None
    """Folder of the model under the value head, as model.source, with the same tokenizer. Null: a copy of the
    policy's initial weights."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Learning rate of its AdamW, whose other settings are the policy's."""
    value_clip: float = Field(default=0.2, ge=0)
    """A value's loss is clipped where it moves further than this from the step's start. 0: no clip."""
    warmup_steps: int = Field(default=5, ge=0)
    """Training steps in which only the critic learns; the policy keeps its weights under new versions."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the next token's value."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Of GAE: 0 trusts the critic alone, 1 the rewards alone."""


class DeepSpeed(Section):
    """Read by trainer deepspeed only."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over ranks. 0: nothing; 1: optimizer states; 2: gradients too; 3: weights too."""
    ranks: int = Field(default=1, ge=1)
    """Processes that train together; each takes a share of every batch."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory and update there; stages 1 to 3."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What ranks talk through. auto: nccl where there is a GPU, else gloo."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which ranks that wait for each other give up, and the run fails."""


class Training(Section):
    """The optimizer, the loss and the correction for staleness."""

    trainer: TrainerName = "torch"
    """torch (one process), deepspeed (ZeRO, any number of ranks), or the dotted path of your own trainer."""
    algorithm: AlgorithmName = "dapo"
    """Advantages and loss: grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, ppo, gspo, cispo,
    or the dotted path of your own. Keys that you leave out take its own defaults, where it has some."""
    correction: Literal[
        "tis", "sequence_tis", "icepop", "decoupled", "sequence_mask", "behaviour", "none"
    ] = "tis"
    """For the lag. tis: importance weight of each token up to tis_cap; sequence_tis: of each response;
    icepop: weight 0 outside icepop_band; decoupled: not truncated; sequence_mask: tis, without responses
    outside sequence_band; behaviour: clip against behaviour log-probs; none: with staleness.bound 0 only."""
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
    """Most tokens, prompt and response, in one forward and backward pass of a rank; padding counts."""
    packing: bool = False
    """Run rows one behind the other, without padding: for attention "flash_attention_2", or rows of very
    different length. Padded rows are sorted by length, and cost less where attention needs a mask."""
    gradient_checkpointing: bool = False
    """Keep fewer activations and compute them again: less memory, about a third more time."""
    attention: str | None = None
    """Attention implementation by transformers' name, such as sdpa. Null: the model's own."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight of corrections tis, sequence_tis and sequence_mask."""
    icepop_band: Annotated[tuple[Ratio, Ratio], Strict(False)] = (0.5, 5.0)
    """Least and largest ratio of a token that correction icepop trains on."""
    sequence_band: Annotated[tuple[Ratio, Ratio], Strict(False)] = (0.8, 1.25)
    """Least and largest geometric mean ratio of a response that correction sequence_mask trains on."""
    dynamic_sampling: bool = True
    """Drop groups whose raw rewards are all equal, and generate others in their place."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_new_tokens over which the penalty grows linearly. 0: no penalty."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Taken off the shaped reward of a response that uses the whole budget."""
    kl: Kl = Kl()
    critic: CriticModel = CriticModel()
    deepspeed: DeepSpeed = DeepSpeed()
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer."""
