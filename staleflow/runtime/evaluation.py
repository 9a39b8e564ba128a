"""Evaluation on a fixed held-out set, each time with exactly one weight version.

Invariants: the weights are those of the requested version, pinned in the parameter server until they are
loaded; evaluation has its own engine, so it never takes capacity from training; a prompt gets the same random
numbers at every version, so two versions differ only by their weights.

pass@k is the estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374,
section 2.1): with c right responses among n, 1 - C(n - c, k) / C(n, k), averaged over the prompts. A response
that the verifier could not score counts as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from staleflow.data.trajectory import FinishReason, Prompt, Reward, Trajectory
from staleflow.errors import RunFailed
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine

ANSWER_LIMIT_S = 600.0
"""The next reward of an evaluation must arrive within this time; the pool's own limits are far below."""
SAMPLED, GREEDY = "heldout", "heldout_greedy"
"""The sets: the same prompts, with sampled and with greedy responses."""


class Scorer(Protocol):
    """Interface of `RewardPool` and `InlineScorer`."""

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Submit requests for scoring."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reward]]:
        """(trajectory id, reward) of new results."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What to generate, and the metrics to compute."""

    max_new_tokens: int
    """Limit on the tokens of one response."""
    samples: int = 1
    """Sampled responses per prompt."""
    pass_at: tuple[int, ...] = ()
    """Each k of pass@k; none above `samples`."""
    pass_score: float = 1.0
    """Minimum raw score of a right response."""
    greedy: bool = True
    """Also generate one greedy response per prompt."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of k responses drawn from `samples` is right, if `right` of them are.

    Unbiased estimate for k new responses. 1 <= k <= samples, 0 <= right <= samples. Source: see the module.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


class Evaluator:
    """Generates responses to all held-out prompts and scores them."""

    def __init__(
        self,
        *,
        engine: Engine,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        request: Callable[[Trajectory], ScoreRequest],
        plan: EvaluationPlan,
    ) -> None:
        """`request` turns a finished trajectory into a scoring request."""
        self._engine = engine
        self._prompts = prompts
        self._scorer = scorer
        self._request = request
        self._plan = plan

    def evaluate(self, tensors: Mapping[str, NDArray[Any]], version: int) -> dict[str, float]:
        """The metrics of one version, without their prefix `eval/`.

        For the set `heldout`: `avg@n` (mean raw score) and a `pass@k` for each k of the plan; for
        `heldout_greedy`: `avg@1`; for both: mean length and the share truncated by the budget; and the number
        of prompts. `tensors` must stay valid until this returns. Raises EngineError if the engine fails,
        RunFailed if the verifier does not answer.
        """
        if self._engine.version != version:
            self._engine.load_weights(tensors, version, "recompute")
        finished, rewards = self._answers()
        plan = self._plan
        sets = {SAMPLED: plan.samples, **({GREEDY: 1} if plan.greedy else {})}
        values: dict[str, float] = {f"{SAMPLED}/prompts": float(len(self._prompts))}
        for name, samples in sets.items():
            by_prompt = [
                [rewards[_trajectory_id(name, index, member)] for member in range(samples)]
                for index in range(len(self._prompts))
            ]
            values[f"{name}/avg@{samples}"] = _mean([score for scores in by_prompt for score in scores])
            for k in plan.pass_at if name == SAMPLED else ():
                right = [sum(score >= plan.pass_score for score in scores) for scores in by_prompt]
                values[f"{name}/pass@{k}"] = _mean([pass_at_k(samples, c, k) for c in right])
            of_set = [t for t in finished if t.group_id.startswith(f"eval-{name}-")]
            values[f"{name}/response_len_mean"] = _mean([t.response_len for t in of_set])
            values[f"{name}/truncated_ratio"] = _mean(
                [t.finish_reason is FinishReason.LENGTH for t in of_set]
            )
        return values

    def close(self) -> None:
        """Free engine and scorer."""
        self._engine.close()
        self._scorer.close()

    def _answers(self) -> tuple[list[Trajectory], dict[str, float]]:
        """All responses, and their raw scores by id. Scoring overlaps with generation."""
        expected = self._begin()
        finished: list[Trajectory] = []
        rewards: dict[str, float] = {}
        while len(finished) < expected:
            ended = self._engine.step()
            if ended:
                finished.extend(ended)
                self._scorer.submit([self._request(t) for t in ended])
                rewards |= {name: reward.raw for name, reward in self._scorer.poll()}
        while len(rewards) < expected:
            more = self._scorer.poll(ANSWER_LIMIT_S)
            if not more:
                raise RunFailed(
                    f"the verifier did not answer within {ANSWER_LIMIT_S:.0f} s during an evaluation"
                )
            rewards |= {name: reward.raw for name, reward in more}
        return finished, rewards

    def _begin(self) -> int:
        """Queue all trajectories; returns their number."""
        plan = self._plan
        count = 0
        for index, prompt in enumerate(self._prompts):
            for name, samples in ((SAMPLED, plan.samples), (GREEDY, int(plan.greedy))):
                for member in range(samples):
                    trajectory = Trajectory(
                        trajectory_id=_trajectory_id(name, index, member),
                        group_id=f"eval-{name}-p{index}",
                        member=member,
                        prompt=prompt,
                        max_new_tokens=plan.max_new_tokens,
                    )
                    self._engine.add(trajectory, greedy=name == GREEDY)
                    count += 1
        return count


def _trajectory_id(name: str, index: int, member: int) -> str:
    return f"eval-{name}-p{index}-m{member}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
