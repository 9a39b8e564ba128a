"""Measured cells as rows of a table, and the lines of a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from staleflow.experiments.cells import CellOutcome
from staleflow.experiments.points import middle
from staleflow.experiments.study import Table
from staleflow.reporting.spread import Spread
from staleflow.simulation.bounds import SIDES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    from staleflow.reporting.svg import standalone_svg

    colours = dict(
        zip(dict.fromkeys(s for panel in panels for s in panel.lines), cycle(COLOURS), strict=False)
    )
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(rows, columns, squeeze=False)
        flat = [axis for row in axes for axis in row]
        for axis, panel in zip(flat, panels, strict=False):
            _draw_panel(axis, panel, colours)
            axis.set_xlabel(along)
        for axis in flat[len(panels) :]:
            axis.set_visible(False)
        for row in axes:
            row[0].set_ylabel(label)
        figure.legend(*flat[0].get_legend_handles_labels(), loc="outside right upper")

    return standalone_svg(name, 3.6 * columns + 1.4, 2.5 * rows, draw)


def _draw_panel(axis: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    xs = range(len(panel.marks))
    for system, spreads in panel.lines.items():
        bars = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        axis.errorbar(
            xs,
            [s.median for s in spreads],
            yerr=bars,
            fmt="o-",
            markersize=3.5,
            capsize=2.0,
            linewidth=1.3,
            color=colours[system],
            label=system,
        )
    if panel.bound:
        axis.plot(xs, panel.bound, "k--", linewidth=0.9, label="no layout exceeds")
    axis.set_title(panel.title)
    axis.set_xticks(list(xs), panel.marks)
    axis.set_ylim(bottom=0)
