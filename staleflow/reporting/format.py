"""Numbers as words, the same on the page and on the terminal. What was not measured is ABSENT."""

from __future__ import annotations

from staleflow.reporting.headline import ABSENT, Headline

COLUMNS = (
    "policy", "η", "steps", "wall time", "trained tok/s", "staleness mean", "staleness max",
    "sampled accuracy", "trainer waited", "instances idle",
)  # fmt: skip


def cells(n: Headline) -> list[str]:
    """Return one text per name in COLUMNS."""
    return [
        n.policy or ABSENT,
        ABSENT if n.bound is None else str(n.bound),
        str(n.steps),
        clock(n.seconds),
        whole(n.tokens_per_s),
        ABSENT if n.staleness_mean is None else f"{n.staleness_mean:.2f}",
        ABSENT if n.staleness_max is None else str(n.staleness_max),
        accuracy_text(n),
        share(n.shares.trainer_waiting),
        share(n.shares.idle),
    ]


def accuracy_text(n: Headline) -> str:
    """Return `0.53 → 0.70`, or the one value there is."""
    if n.first_accuracy is None or n.last_accuracy is None:
        return ABSENT
    if n.first_version == n.last_version:
        return f"{n.last_accuracy:.3f}"
    return f"{n.first_accuracy:.3f} → {n.last_accuracy:.3f}"


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
    """Return `1,234`, or `12.3` where the first digits would be lost."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def times(value: float | None) -> str:
    """Return `1.91×`."""
    return ABSENT if value is None else f"{value:.2f}×"  # noqa: RUF001


def share(value: float | None) -> str:
    """Return `46%`."""
    return ABSENT if value is None else f"{value:.0%}"
