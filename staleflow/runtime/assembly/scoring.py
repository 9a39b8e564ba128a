"""Verifiers and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.config.schema import Config
from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.runtime.assembly.data import scoring_request
from staleflow.runtime.assembly.engines import build_engine
from staleflow.runtime.evaluation import EvaluationPlan, Evaluator, Scorer

if TYPE_CHECKING:
    from staleflow.servers.transport import Handle


def build_pool(config: Config, log: Path | None = None) -> Scorer:
    """Verifier processes with hard limits."""
    from staleflow.reward.pool import RewardPool

    reward = config.reward
    return RewardPool(
        reward.verifier,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        on_failure=reward.on_failure,
        log=log,
    )


def build_inline_scorer(config: Config) -> Scorer:
    """The verifier in this process, without limits."""
    from staleflow.reward.inline import InlineScorer

    return InlineScorer(config.reward.verifier, config.reward.on_failure)


def build_evaluator(
    config: Config,
    tokenizer: Tokenizer,
    prompts: tuple[Prompt, ...],
    scorer: Scorer,
    *,
    weights: Handle | None = None,
    log: Path | None = None,
) -> Evaluator:
    """An engine of its own over the held-out prompts."""

    def no_time(seconds: float) -> None:
        """Evaluation with the fake engine takes no time."""

    evaluation = config.evaluation
    return Evaluator(
        engine=build_engine(evaluating(config), tokenizer, spend=no_time, weights=weights, log=log),
        prompts=prompts,
        scorer=scorer,
        request=scoring_request(tokenizer),
        plan=EvaluationPlan(
            max_new_tokens=evaluation.max_new_tokens or config.rollout.max_new_tokens,
            samples=evaluation.samples,
            pass_at=evaluation.pass_at,
            pass_score=evaluation.pass_score,
            greedy=evaluation.greedy,
        ),
    )


def evaluating(config: Config) -> Config:
    """The config as the evaluation's engine sees it."""
    engine = config.evaluation.engine or config.rollout.engine
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def instance_names(config: Config) -> list[str]:
    """`i0`, `i1`, ..."""
    return [f"i{n}" for n in range(config.rollout.instances)]
