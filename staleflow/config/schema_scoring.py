"""The sections `environment`, `reward` and `evaluation` of the schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from staleflow.config.base import EngineName, EnvironmentName, Section, VerifierName

Count = Annotated[int, Field(ge=1)]


class EnvironmentConfig(Section):
    """What replies to the model between its turns: tools, further questions, games."""

    name: EnvironmentName = "single_turn"
    """single_turn (none), scripted_turns, or the dotted path of your own class (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    workers: int = Field(default=4, ge=1)
    """Environment calls that run at the same time."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which an environment call counts as failed and its trajectory is left out of training."""


class RewardConfig(Section):
    """Scoring of responses, in separate processes with hard limits."""

    verifier: VerifierName = "exact_match"
    """exact_match, reasoning_gym, math_verify, or the dotted path of your own function."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds after which a verifier call is killed."""
    workers: int = Field(default=1, ge=1)
    """Verifier processes."""
    memory_mb: int = Field(default=1024, ge=64)
    """MiB of memory above which a verifier process is killed."""
    on_failure: Literal["zero", "mask"] = "zero"
    """Trajectories whose verifier failed (time, memory, crash). zero: score them 0; mask: leave them out."""


class Evaluation(Section):
    """Accuracy on a fixed held-out set, sampled and greedy, of single weight versions."""

    every: int = Field(default=10, ge=0)
    """Training steps between evaluations; the first and the last version are evaluated too. 0: none."""
    backlog: int = Field(default=2, ge=1)
    """Versions that may wait while one is evaluated; when more are due, the oldest waiting one is skipped."""
    engine: EngineName | None = None
    """Engine of the evaluation, for example torch beside vllm if memory is short. Null: rollout.engine."""
    samples: int = Field(default=1, ge=1)
    """Sampled responses per held-out prompt, for avg@n and pass@k."""
    pass_at: Annotated[tuple[Count, ...], Strict(False)] = ()
    """Values of k for which pass@k is reported (an unbiased estimate); each at most samples."""
    pass_score: float = 1.0
    """Lowest raw score that counts as correct for pass@k."""
    greedy: bool = True
    """Also generate one greedy response per prompt, for heldout_greedy/avg@1."""
    prompts: int = Field(default=512, ge=1)
    """Number of held-out prompts."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one response. Null: rollout.max_new_tokens."""
