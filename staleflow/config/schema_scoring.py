"""The sections `reward` and `evaluation` of the schema: what is made of responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from staleflow.config.base import Section, VerifierName


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


class Evaluation(Section):
    """Accuracy on a fixed held-out set, greedy and sampled, each time on one weight version."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; the first and the last version are evaluated too. 0: none."""
    prompts: int = Field(default=512, ge=1)
    """Held-out prompts."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response. Null: rollout.max_new_tokens."""
