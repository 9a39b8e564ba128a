"""Verifiers: functions that score one response.

Invariants:

- a verifier is any `Callable[[ScoreRequest], float]`; it may hang, crash or raise, because the caller
  (`pool`) limits and counts that; so it sets no time limit itself;
- it compares the response with the answer and never relies on "score > 0": some graders give a small score to
  a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from staleflow.errors import ConfigError
from staleflow.registry import load_named


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Input of a verifier."""

    trajectory_id: str
    prompt: str
    response: str
    """The decoded response, without stop tokens."""
    answer: Any
    """The data source's correct answer; picklable."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The prompt's metadata, for verifiers that need more than the answer."""


Verifier = Callable[[ScoreRequest], float]

VERIFIERS = {
    "exact_match": "staleflow.reward.verifiers.exact_match",
    "reasoning_gym": "staleflow.reward.verify_reasoning_gym.reasoning_gym_score",
    "math_verify": "staleflow.reward.verify_math.math_score",
}
"""Verifiers by name; a dotted path to a function also works."""


def load_verifier(name: str) -> Verifier:
    """Import the verifier with that name or dotted path.

    Raises ConfigError with the reason if that fails.
    """
    verifier = load_named("verifier", name, VERIFIERS)
    if not callable(verifier):
        raise ConfigError(f"verifier {name!r} is a {type(verifier).__name__}, not a function")
    return verifier  # type: ignore[no-any-return]


def exact_match(request: ScoreRequest) -> float:
    """1.0 when the response is the answer, else 0.0.

    The comparison ignores leading and trailing white space and is case-sensitive. If the metadata has
    `answer_after` (a marker such as `####` or `=`), only the text after its last occurrence in the response
    is compared, and a response without the marker is wrong.
    """
    response = request.response
    marker = request.metadata.get("answer_after")
    if marker is not None:
        _, found, response = response.rpartition(str(marker))
        if not found:
            return 0.0
    return float(response.strip() == str(request.answer).strip())
