"""Did-you-mean: the known name that is most like a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

LIKE_ENOUGH = 0.55
"""Lowest likeness (0 to 1) that is worth a suggestion: `eat` for `eta` has 0.67, unrelated words less."""


def likeness(one: str, other: str) -> float:
    """1 for the same letters, whatever their case; 0 for none in common."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean x?` for the closest known name, or "" when none is close."""
    score, closest = max(((likeness(name, word), word) for word in known), default=(0.0, ""))
    return f"did you mean {closest}?" if score >= LIKE_ENOUGH else ""
