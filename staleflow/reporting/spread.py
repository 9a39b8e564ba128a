"""One figure over several runs: its median and what lies between the least and the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Over at least one value."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median=median(values), least=min(values), most=max(values))


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of the values that were measured; None where there is none."""
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None
