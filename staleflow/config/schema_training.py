"""The section `training` of the schema: optimizer, loss, and correction for staleness."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import AlgorithmName, Section, TrainerName

Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=0)]


class Kl(Section):
    """KL penalty that keeps the policy near a reference model; every algorithm reads it."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference, per token and nat. 0: no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate for a token. k1: log-ratio; k2: half its square; k3: unbiased and never negative."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: subtracted from the reward of each token."""
    reference: str | None = None
    """Folder of the reference model, as in model.source. Null: the initial weights of the run."""


class CriticModel(Section):
    """The critic, which estimates the value before each token; only algorithms with a critic read it."""

    source: str | None = None
    """Folder of the model under the value head, as in model.source, with the same tokenizer. Null: a copy of
    the policy's initial weights."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Learning rate of the critic's AdamW; its other settings are the policy's."""
    value_clip: float = Field(default=0.2, ge=0)
    """The loss of a value is clipped where the value moves further than this within a step. 0: no clip."""
    warmup_steps: int = Field(default=5, ge=0)
    """Training steps in which only the critic learns; the policy's new versions keep their weights."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the next token's value."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """λ of GAE: 0 uses the critic alone, 1 the rewards alone."""


class DeepSpeed(Section):
    """Settings of the deepspeed trainer; the torch trainer ignores them."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """State sharded over ranks. 0: none; 1: optimizer states; 2: gradients too; 3: weights too."""
    ranks: int = Field(default=1, ge=1)
    """Processes that train together; each takes a share of every batch."""
    offload_optimizer: bool = False
    """Keep optimizer states in host memory and update there; stages 1 to 3."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication between ranks. auto: nccl with a GPU, else gloo."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which ranks that wait for each other give up and the run fails."""


class Training(Section):
    """The optimizer, the loss and the correction for staleness."""

    trainer: TrainerName = "torch"
    """torch (one process), deepspeed (ZeRO, any number of ranks), or the dotted path of your own trainer."""
    algorithm: AlgorithmName = "dapo"
    """Advantages and loss: grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, ppo, gspo, cispo,
    or the dotted path of your own. An algorithm's own defaults apply to keys that you do not set."""
    correction: Literal[
        "tis", "sequence_tis", "icepop", "decoupled", "sequence_mask", "behaviour", "none"
    ] = "tis"
    """Correction for the lag. tis: importance weight per token, at most tis_cap; sequence_tis: the same per
    response; icepop: weight 0 outside icepop_band; decoupled: not truncated; sequence_mask: tis, without
    responses outside sequence_band; behaviour: clip against behaviour log-probs; none: with staleness.bound 0
    only."""
    learning_rate: float = Field(default=1.5e-4, gt=0)
    """Learning rate of AdamW after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    warmup_steps: int = Field(default=10, ge=0)
    """Training steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Larger gradients are scaled down to this norm."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per batch; together they make one weight version."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens, prompt and response, in one forward and backward pass of a rank; padding counts."""
    packing: bool = False
    """Concatenate rows instead of padding them: for attention "flash_attention_2", or rows of very different
    lengths. Padded rows are sorted by length and are cheaper where attention needs a mask."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them: less memory, about a third more time."""
    attention: str | None = None
    """Attention implementation by transformers' name, such as sdpa. Null: the model's default."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped at 1 + clip_high."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight of corrections tis, sequence_tis and sequence_mask."""
    icepop_band: Annotated[tuple[Ratio, Ratio], Strict(False)] = (0.5, 5.0)
    """Smallest and largest ratio of a token that correction icepop trains on."""
    sequence_band: Annotated[tuple[Ratio, Ratio], Strict(False)] = (0.8, 1.25)
    """Smallest and largest geometric mean ratio of a response that correction sequence_mask trains on."""
    dynamic_sampling: bool = True
    """Drop groups whose raw rewards are all equal and generate others in their place."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_new_tokens over which the penalty grows linearly. 0: no penalty."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Penalty subtracted from the shaped reward of a response that uses all of rollout.max_new_tokens."""
    kl: Kl = Kl()
    critic: CriticModel = CriticModel()
    deepspeed: DeepSpeed = DeepSpeed()
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer."""
