"""The `math_verify` verifier: mathematical equality of the response's final expression and the answer.

Source: math-verify 0.9. Its own time limits are off: they are signals, which C code ignores and threads
cannot have (F24); the worker process is killed instead.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from staleflow.reward.verifiers import ScoreRequest

# It warns, once per process, that its limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_score(request: ScoreRequest) -> float:
    """1.0 when the response's expression equals the answer's, else 0.0, also when it has none.

    The answer may be plain (`1/2`) or LaTeX with or without its dollar signs. Raises ValueError when no
    expression is found in the answer itself: the data are wrong then, not the response.
    """
    answer = str(request.answer)
    gold = _parsed(answer) or _parsed(f"${answer}$")
    if not gold:
        raise ValueError(f"no mathematical expression in the answer {answer!r}")
    try:
        return float(verify(gold, _parsed(request.response), timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        return 0.0  # the grader chokes on what a model may write; that is no answer


def _parsed(text: str) -> list[Any]:
    try:
        return parse(text, parsing_timeout=None, raise_on_error=True)  # type: ignore[no-any-return]
    except MemoryError:
        raise  # with raise_on_error off the library would swallow it
    except Exception:
        return []
