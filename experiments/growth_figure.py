"""How the cost of coordination grows, as one SVG that stands by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from staleflow.experiments.coordination_cost import Cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES: tuple[tuple[str, Callable[[Cost], float], str], ...] = (
    ("cycle p50", lambda c: c.cycle_p50_ms, "#1f6feb"),
    ("cycle p99", lambda c: c.cycle_p99_ms, "#d1242f"),
    ("all reports of an interval", lambda c: c.reports_ms, "#2da44e"),
)


def growth_figure(by_instances: Sequence[Cost], by_pending: Sequence[Cost]) -> str:
    """Milliseconds over instances, and over waiting trajectories, both axes logarithmic."""
    from staleflow.reporting.svg import standalone_svg

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        most, largest = max(c.pending for c in by_instances), max(c.instances for c in by_pending)
        for axis, costs, sizes, title in (
            (left, by_instances, [c.instances for c in by_instances], f"instances ({most:,} wait)"),
            (right, by_pending, [c.pending for c in by_pending], f"waiting ({largest:,} instances)"),
        ):
            for label, value, colour in LINES:
                axis.plot(sizes, [value(c) for c in costs], "o-", color=colour, label=label)
            axis.set(xscale="log", yscale="log", xlabel=title)
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axis.minorticks_off()
        left.set_ylabel("ms, one core")
        left.legend()

    return standalone_svg("growth", 8.0, 3.0, draw)
