"""Measured cells as rows of a table, and the lines of a figure."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staleflow.experiments.cells import CellOutcome
from staleflow.experiments.points import middle
from staleflow.experiments.study import Table
from staleflow.reporting.spread import Spread
from staleflow.simulation.bounds import SIDES

COLUMNS = (
    *("system", "GPUs", "cap", "tokens/s", "least", "most", "s a step", "update s"),
    *("of rollout", "of trainer", "of latency", "side", "trainer idle", "instances idle", "pulling"),
    *("staleness", "oldest", "preemptions"),
)
COLUMNS_NOTE = (
    "Medians over seeds. GPUs: instances x GPUs of each + GPUs for training, as tuned (`sync`: all for "
    "both). tokens/s: generated tokens trained on; least, most: over seeds. of ...: share of the bounds of "
    "this layout, which no policy exceeds; side: the least of them. Idle: share of the time; of instances, "
    "time in which `sync` trains is idle too."
)
COLOURS = ("#24292f", "#8c959f", "#8250df", "#bf8700", "#1f6feb", "#d1242f", "#2da44e", "#0a7b83")


def cell_row(name: str, outcome: CellOutcome) -> tuple[str | float, ...]:
    """One cell."""
    runs = outcome.runs
    mid, rate = middle(runs), Spread.of([run.tokens_per_s for run in runs])
    shares = [Spread.of([run.tokens_per_s / getattr(run, side) for run in runs]).median for side in SIDES]
    return (
        name,
        outcome.choice.layout_text,
        "" if outcome.choice.cap is None else str(outcome.choice.cap),
        rate.median,
        rate.least,
        rate.most,
        mid.step_s,
        mid.update_s,
        *(f"{share:.0%}" for share in shares),
        mid.binding,
        f"{mid.trainer_idle:.0%}",
        f"{mid.instances_idle:.0%}",
        f"{mid.pulling:.1%}",
        mid.staleness_mean,
        max(run.staleness_max for run in runs),
        int(mid.preemptions),
    )


def cell_table(
    title: str, along: Sequence[str], rows: Sequence[tuple[Sequence[str | float], str, CellOutcome]]
) -> Table:
    """Rows of (what the cell is, its system's name, what was measured); `along` names the first columns."""
    return Table(
        title=title,
        columns=(*along, *COLUMNS),
        rows=tuple((*what, *cell_row(name, outcome)) for what, name, outcome in rows),
        note=COLUMNS_NOTE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram: a line for each system over evenly spaced marks."""

    title: str
    marks: tuple[str, ...]
    lines: Mapping[str, Sequence[Spread]]
    bound: Sequence[float] = ()
    """Dashed: what no layout exceeds."""


def panels_figure(name: str, panels: Sequence[Panel], *, columns: int, along: str, label: str) -> str:
    """Medians, with bars from least to most; one SVG that stands by itself."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(system for panel in panels for system in panel.lines))
    rows = -(-len(panels) // columns)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8.0}):
        figure = Figure(figsize=(3.6 * columns + 1.4, 2.5 * rows), layout="constrained", facecolor="white")
        axes = figure.subplots(rows, columns, squeeze=False)
        flat = [axis for row in axes for axis in row]
        for axis, panel in zip(flat, panels, strict=False):
            xs = range(len(panel.marks))
            for system, spreads in panel.lines.items():
                middles = [s.median for s in spreads]
                bars = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
                axis.errorbar(
                    xs,
                    middles,
                    yerr=bars,
                    fmt="o-",
                    markersize=3.5,
                    capsize=2.0,
                    linewidth=1.3,
                    color=COLOURS[names.index(system) % len(COLOURS)],
                    label=system,
                )
            if panel.bound:
                axis.plot(xs, panel.bound, "k--", linewidth=0.9, label="no layout exceeds")
            axis.set_title(panel.title, fontsize=8.0, loc="left")
            axis.set_xticks(list(xs), panel.marks)
            axis.set_xlabel(along)
            axis.set_ylim(bottom=0)
            axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        for axis in flat[len(panels) :]:
            axis.set_visible(False)
        for row in axes:
            row[0].set_ylabel(label)
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return text.getvalue()
