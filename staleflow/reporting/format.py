"""Numbers as text, the same on the page and on the terminal. What was not measured is ABSENT."""

from __future__ import annotations

ABSENT = "–"  # noqa: RUF001
"""Shown where nothing was measured or set."""


def clock(seconds: float | None) -> str:
    """Return `42 s`, `12:34` or `1:02:03`."""
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.0f} s"
    rest = int(seconds)
    hours, minutes = rest // 3600, rest // 60 % 60
    return f"{hours}:{minutes:02}:{rest % 60:02}" if hours else f"{minutes}:{rest % 60:02}"


def whole(value: float | None) -> str:
    """Return `1,234`, or `12.3` below 100."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def times(value: float | None) -> str:
    """Return `1.91×`."""
    return ABSENT if value is None else f"{value:.2f}×"  # noqa: RUF001


def share(value: float | None) -> str:
    """Return `46%`."""
    return ABSENT if value is None else f"{value:.0%}"


def fine_share(value: float) -> str:
    """Return `46%`, or `4.6%` below 10 %."""
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def count(value: float) -> str:
    """Return `1,234`."""
    return f"{value:,.0f}"
