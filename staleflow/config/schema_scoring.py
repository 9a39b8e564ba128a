"""The sections `environment`, `reward` and `evaluation` of the schema: what is made of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from staleflow.config.base import EngineName, EnvironmentName, Section, VerifierName

Count = Annotated[int, Field(ge=1)]


class EnvironmentConfig(Section):
    """What answers the model between its turns: tools, further questions, games."""

    name: EnvironmentName = "single_turn"
    """single_turn (none), scripted_turns, or the dotted path of your own class (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    workers: int = Field(default=4, ge=1)
    """Trajectories whose environment is asked at the same time."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which an environment has failed, and its trajectory is left out of training."""


class RewardConfig(Section):
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
    """Accuracy on a fixed held-out set, sampled and greedy, each time on one weight version."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; the first and the last version are evaluated too. 0: none."""
    backlog: int = Field(default=2, ge=1)
    """Versions that may wait while one is evaluated; if more come due, the oldest waiting one is skipped."""
    engine: EngineName | None = None
    """What generates for it, e.g. torch beside a vllm run where memory is short. Null: rollout.engine."""
    samples: int = Field(default=1, ge=1)
    """Sampled responses per held-out prompt, for avg@n and pass@k."""
    pass_at: Annotated[tuple[Count, ...], Strict(False)] = ()
    """Each k for which pass@k is reported, estimated from the samples without bias; at most samples."""
    pass_score: float = 1.0
    """Raw score from which on a response counts as right for pass@k."""
    greedy: bool = True
    """Also generate one greedy response per prompt, for heldout_greedy/avg@1."""
    prompts: int = Field(default=512, ge=1)
    """Held-out prompts."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response. Null: rollout.max_new_tokens."""
