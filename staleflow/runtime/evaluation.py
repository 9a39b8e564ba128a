"""Evaluation on a fixed held-out set, each time on exactly one weight version.

Invariants: the weights are those of the version asked for, pinned in the parameter server until they are
loaded; evaluation has engines of its own, so that it never takes a place from training; the same prompt gets
the same random numbers at every version, so that two versions differ by their weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from staleflow.data.trajectory import Prompt, Reward, Trajectory
from staleflow.errors import RunFailed
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine

ANSWER_LIMIT_S = 600.0
"""All answers of an evaluation must be scored within this time; the pool's own limits are far below."""


class Scorer(Protocol):
    """`RewardPool` and `InlineScorer`."""

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Have requests scored."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reward]]:
        """What has been scored."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class Evaluator:
    """Evaluates by generating one response per held-out prompt, sampled and greedy."""

    def __init__(
        self,
        *,
        sampled: Engine,
        greedy: Engine,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        request: Callable[[Trajectory], ScoreRequest],
        max_new_tokens: int,
    ) -> None:
        """`request` makes a scoring request of a finished trajectory."""
        self._engines = {"heldout": sampled, "heldout_greedy": greedy}
        self._prompts = prompts
        self._scorer = scorer
        self._request = request
        self._max_new_tokens = max_new_tokens

    def evaluate(self, tensors: Mapping[str, NDArray[Any]], version: int) -> dict[str, float]:
        """`<set>/avg@1` for the set sampled and greedy, and the number of prompts.

        `tensors` need to stay valid until this returns. Raises EngineError when an engine breaks.
        """
        values: dict[str, float] = {"heldout/prompts": float(len(self._prompts))}
        for name, engine in self._engines.items():
            if engine.version != version:
                engine.load_weights(tensors, version, "recompute")
            finished = self._generate(name, engine)
            scores = self._score(finished)
            values[f"{name}/avg@1"] = sum(scores) / max(1, len(scores))
            values[f"{name}/response_len_mean"] = sum(t.response_len for t in finished) / max(
                1, len(finished)
            )
        return values

    def close(self) -> None:
        """Free engines and scorer."""
        for engine in self._engines.values():
            engine.close()
        self._scorer.close()

    def _generate(self, name: str, engine: Engine) -> list[Trajectory]:
        for index, prompt in enumerate(self._prompts):
            group = f"eval-{name}-p{index}"
            engine.add(
                Trajectory(
                    trajectory_id=f"{group}-m0",
                    group_id=group,
                    member=0,
                    prompt=prompt,
                    max_new_tokens=self._max_new_tokens,
                )
            )
        finished: list[Trajectory] = []
        while len(finished) < len(self._prompts):
            finished.extend(engine.step())
        return finished

    def _score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        self._scorer.submit([self._request(t) for t in trajectories])
        answers: list[tuple[str, Reward]] = []
        while len(answers) < len(trajectories):
            more = self._scorer.poll(ANSWER_LIMIT_S)
            if not more:
                raise RunFailed("the verifier did not answer an evaluation")
            answers.extend(more)
        return [reward.raw for _, reward in answers]
