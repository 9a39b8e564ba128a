"""What is known about one metric. `catalogue.py` has the table of all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from staleflow.telemetry.rows import RowKind

OverSteps = Literal["sum", "mean", "max", "min", "last", "none"]
"""How the values of several rows become one value. none: they do not, as for texts."""

PLACEHOLDERS = {
    "i": ("[^/]+", "a rollout instance, such as `i0`"),
    "offset": (r"\d+", "a staleness buffer; 0 is the batch of the next training step"),
    "bucket": (r"\d+", "lengths from this number of tokens to twice it less one; 1 includes 0"),
    "set": ("[^/]+", "an evaluation set: `heldout` is sampled, `heldout_greedy` is decoded greedily"),
    "k": (r"\d+", "a number of responses to each prompt"),
    "other": (".+", "any name"),
}
"""What may stand in angle brackets in the name of a family: a regular expression, and its meaning."""

SHORT_UNITS = {"s": "s", "tokens": "tokens", "tokens/s": "tok/s"}
"""Units that consoles write behind a number. Others are clear from the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or one family of metrics whose names differ in the placeholders."""

    name: str
    """Slash-separated, `mean`, `max` or `min` last. Of a family with placeholders: `instance/<i>/version`."""
    kinds: tuple[RowKind, ...]
    """The rows that have it."""
    unit: str
    """In the plural; `s` for seconds; `share` for 0 to 1; empty for a plain number or a text."""
    over_steps: OverSteps
    meaning: str
    """One sentence."""
    weight: str = ""
    """Of a mean over steps: the metric, or family to be summed, that weights each row. Empty: all alike."""
    label: str = ""
    """What consoles call it. Empty: they do not show it."""
    digits: int = 2
    """Decimals that consoles show."""
    title: str = ""
    """What the report calls it, in curves and tables. Empty: the report does not show it by itself."""
    figure: str = ""
    """Its name in `report --json` where the comparison has its sum over the run. Empty: it has not."""
    curve: bool = False
    """The report draws it over the training steps."""

    @property
    def section(self) -> str:
        """The name's first part."""
        return self.name.partition("/")[0]

    @property
    def is_family(self) -> bool:
        """Whether the name has placeholders."""
        return "<" in self.name

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names it is about."""
        parts = re.split(r"<(\w+)>", self.name)
        return re.compile(
            "".join(
                PLACEHOLDERS[part][0] if place % 2 else re.escape(part) for place, part in enumerate(parts)
            )
        )

    def text(self, value: float | str) -> str:
        """The value as consoles show it: `0.50 s`."""
        if isinstance(value, str):
            return value
        unit = SHORT_UNITS.get(self.unit)
        return f"{value:,.{self.digits}f}" + (f" {unit}" if unit else "")
