"""The `reasoning_gym` verifier: the task family's own `score_answer`.

Source: reasoning-gym 0.1.25. A wrong answer may get a small score (0.01 in some families), so a score above 0
does not mean "right": require 1.0, or set a threshold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from staleflow.reward.verifiers import ScoreRequest


def reasoning_gym_score(request: ScoreRequest) -> float:
    """The family's score in 0..1 of the text in the last `<answer>` tag, or of the whole response.

    The metadata are those of the reasoning-gym entry; its `source_dataset` names the family. If they contain
    `threshold` (above 0), the score is 1.0 at or above it, else 0.0.
    """
    entry = {"question": request.prompt, "answer": request.answer, "metadata": request.metadata}
    answer = extract_answer(request.response)
    score = _scorer(request.metadata["source_dataset"])(
        answer if answer is not None else request.response.strip(), entry
    )
    threshold = request.metadata.get("threshold")
    if threshold is None:
        return score
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be above 0, because wrong answers may score 0")
    return float(score >= threshold)


@functools.cache
def _scorer(family: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(family)  # type: ignore[no-any-return]
