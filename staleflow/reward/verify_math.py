"""The `math_verify` verifier: mathematical equality of the response's final expression and the answer.

Source: math-verify 0.9. Its own time limits are off: they use signals, which C code ignores and threads
cannot receive (F24). The pool kills the worker process instead.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from staleflow.reward.verifiers import ScoreRequest

# The library warns, once per process, that its limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_score(request: ScoreRequest) -> float:
    """1.0 if the response's expression equals the answer's; 0.0 if not, or if the response has none.

    The answer may be plain (`1/2`) or LaTeX with or without dollar signs. Raises ValueError if the answer
    itself contains no expression: then the data are wrong, not the response.
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
        return 0.0  # the grader fails on the response, so it is not a valid answer


def _parsed(text: str) -> list[Any]:
    try:
        return parse(text, parsing_timeout=None, raise_on_error=True)  # type: ignore[no-any-return]
    except MemoryError:
        raise  # with raise_on_error=False the library would swallow it
    except Exception:
        return []
