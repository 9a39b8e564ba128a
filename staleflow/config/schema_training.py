"""The section `training` of the schema: optimizer, loss, and correction for staleness."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from staleflow.config.base import Section, TrainerName

Decay = Annotated[float, Field(ge=0, lt=1)]


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
