"""Learning curves by staleness bound, as one SVG that stands by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from staleflow.experiments.curves import Band, CurveSetting, band, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#24292f", "#1f6feb", "#2da44e", "#bf8700", "#d1242f", "#8250df")
"""By place of the bound among those shown."""
WINDOW = 5
"""Steps that a point of the reward curve is the mean of: a step has a few dozen prompts."""

PANELS: tuple[tuple[str, str, Callable[[CurveSetting], Band]], ...] = (
    ("held-out accuracy, sampled", "weight version", lambda s: s.accuracy),
    (
        f"reward of all that was sampled, {WINDOW} steps",
        "training step",
        lambda s: band([smoothed(run.reward, WINDOW) for run in s.runs]),
    ),
    (
        "staleness of what was trained on, mean",
        "training step",
        lambda s: band([run.staleness for run in s.runs]),
    ),
)


def convergence_figure(settings: Sequence[CurveSetting]) -> str:
    """A row of panels for each learning rate: medians over seeds, shaded from least to most."""
    from staleflow.reporting.svg import standalone_svg

    rates = sorted({s.rate for s in settings})
    bounds = sorted({s.bound for s in settings})

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(rates), len(PANELS), squeeze=False, sharex=True, sharey="col")
        for row, rate in zip(axes, rates, strict=True):
            for axis, (title, along, curve) in zip(row, PANELS, strict=True):
                for setting in (s for s in settings if s.rate == rate):
                    _draw(axis, curve(setting), setting.bound, COLOURS[bounds.index(setting.bound)])
                axis.set_title(title)
                axis.set_xlabel(along)
            row[0].set_ylabel(f"learning rate {rate:g}")
            row[0].set_ylim(0, 1)
            row[1].set_ylim(0, 1)
        axes[0][0].legend(ncols=2)

    return standalone_svg("convergence", 10.2, 2.8 * len(rates), draw)


def _draw(axis: Axes, shown: Band, bound: int, colour: str) -> None:
    axis.fill_between(shown.xs, shown.least, shown.most, color=colour, alpha=0.15, linewidth=0)
    axis.plot(shown.xs, shown.median, color=colour, linewidth=1.4, label=f"η = {bound}")
