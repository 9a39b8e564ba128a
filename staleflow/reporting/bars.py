"""Bars that compare groups of runs, one row per group: throughput, time, and fates of tokens.

Each function returns an `<svg>` element, or None if no run has the data. A single run is a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from staleflow.reporting.groups import RunGroup
from staleflow.reporting.headline import TOKEN_FATES, mean_timings
from staleflow.reporting.svg import FULL_WIDTH, HALF, colour, new_figure, run_colour, to_svg
from staleflow.reporting.utilization import CAUSES

TIMING_ORDER = ("wait_for_batch", "update", "push", "pull", "reward", "save")
TRAINER_PARTS = (
    ("update", "part1", "updating"),
    ("push", "part3", "pushing"),
    ("waiting: busy instances", "warn", "rollout"),
    ("waiting: longest responses", "part4", "longest"),
    ("waiting: rewards", "run3", "reward"),
    ("waiting: pulls", "part5", "pull"),
    ("waiting: nothing running", "bad", "routing"),
    ("waiting: environments", "busy", "environment"),
)
"""Title, colour, and the field or cause of `TimeShares`."""
FATE_COLOURS = {
    "trained": "ok",
    "filtered": "warn",
    "aborted": "bad",
    "discarded": "part3",
    "in_flight": "busy",
}


def throughput(groups: Sequence[RunGroup]) -> str | None:
    """Draw trained tokens/s: a bar for the median of each group, a dot for each run."""
    rates = [[n.tokens_per_s for n in group.numbers if n.tokens_per_s is not None] for group in groups]
    if not any(rates):
        return None
    figure, (axis,) = new_figure(FULL_WIDTH, 0.75 + 0.3 * len(groups))
    for place, of_group in enumerate(rates):
        if of_group:
            middle = median(of_group)
            axis.barh(place, middle, 0.62, color=run_colour(place), alpha=0.45)
            axis.plot(of_group, [place] * len(of_group), "o", color=run_colour(place), markersize=4.0)
            axis.plot([min(of_group), max(of_group)], [place, place], color=run_colour(place), linewidth=1.2)
    _named_rows(axis, groups)
    axis.set_xlim(left=0)
    axis.set_xlabel("trained tokens/s (bar: median; dots: runs)")
    return to_svg(figure, "throughput", "trained tokens/s")


def trainer_time(groups: Sequence[RunGroup]) -> str | None:
    """Draw how the trainer spent its time: work, and waiting by cause."""
    every = [group.shares for group in groups]
    if not any(s.waiting_for for s in every):
        return None
    rows = []
    for title, variable, name in TRAINER_PARTS:
        if name in CAUSES:
            values = [s.waiting_for.get(name, 0.0) for s in every]
        else:
            values = [getattr(s, name) or 0.0 for s in every]
        rows.append((title, variable, values))
    spent = [sum(values[i] for _, _, values in rows) for i in range(len(groups))]
    rows.insert(2, ("other work", "part2", [max(0.0, 1 - s) for s in spent]))
    present = [row for row in rows if any(row[2])]
    return _stacked(groups, present, "trainer", "share of the time", percent=True, width=HALF[0])


def instance_time(groups: Sequence[RunGroup]) -> str | None:
    """Draw how all instances spent their time."""
    every = [group.shares for group in groups]
    if not any(s.decoding is not None for s in every):
        return None
    parts = [
        (
            s.decoding or 0.0,
            s.pulling or 0.0,
            s.commands or 0.0,
            s.idle_while_training or 0.0,
            (s.idle or 0.0) - (s.idle_while_training or 0.0),
        )
        for s in every
    ]
    titles = (
        ("decoding", "part1"), ("pulls", "part4"), ("other commands", "part3"),
        ("idle, trainer working", "bad"), ("idle, trainer waiting", "warn"),
    )  # fmt: skip
    rows = [(title, c, [p[i] for p in parts]) for i, (title, c) in enumerate(titles)]
    rest = [max(0.0, 1 - sum(p)) for p in parts]
    rows.insert(3, ("between", "part0", rest))
    return _stacked(groups, rows, "instance-time", "share of instance time", percent=True, width=HALF[0])


def timings(groups: Sequence[RunGroup]) -> str | None:
    """Draw the mean seconds of each part of a step; parts overlap in an asynchronous run."""
    means = [_mean_of([mean_timings(run) for run in group.runs]) for group in groups]
    present = {name for values in means for name in values}
    names = [n for n in TIMING_ORDER if n in present] + sorted(present - set(TIMING_ORDER))
    if not names:
        return None
    rows = [(name, f"part{min(i, 5)}", [m.get(name, 0.0) for m in means]) for i, name in enumerate(names)]
    return _stacked(groups, rows, "timings", "mean seconds per step", percent=False, width=FULL_WIDTH)


def token_fates(groups: Sequence[RunGroup], *, half: bool) -> str | None:
    """Draw the fates of generated tokens, as shares; `half`: in half the page's width."""
    tokens = [group.tokens for group in groups]
    if not any(t.generated for t in tokens if t):
        return None
    rows = [
        (
            fate,
            FATE_COLOURS[fate],
            [t.fates[fate] / t.generated if t and t.generated else 0.0 for t in tokens],
        )
        for fate in TOKEN_FATES
    ]
    return _stacked(
        groups,
        rows,
        "tokens",
        "share of generated tokens",
        percent=True,
        width=HALF[0] if half else FULL_WIDTH,
    )


def _stacked(
    groups: Sequence[RunGroup],
    rows: Sequence[tuple[str, str, Sequence[float]]],
    name: str,
    label: str,
    *,
    percent: bool,
    width: float,
) -> str:
    """Draw one horizontal bar per group, made of named parts."""
    columns = 3 if width == HALF[0] else 6
    legend_rows = -(-len(rows) // columns)
    figure, (axis,) = new_figure(width, 0.75 + 0.2 * legend_rows + 0.3 * len(groups))
    left = [0.0] * len(groups)
    places = list(range(len(groups)))
    for part, variable, values in rows:
        axis.barh(places, values, 0.62, left=left, color=colour(variable), label=part.replace("_", " "))
        left = [a + b for a, b in zip(left, values, strict=True)]
    _named_rows(axis, groups)
    axis.set_xlabel(label)
    if percent:
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(
        loc="outside upper left", ncols=columns, handlelength=0.9, handleheight=0.9, columnspacing=1.2,
        frameon=False, fontsize=7.5, labelcolor=colour("muted"),
    )  # fmt: skip
    return to_svg(figure, name, label)


def _named_rows(axis: Axes, groups: Sequence[RunGroup]) -> None:
    """Put a group on each row, the first one on top."""
    axis.set_yticks(range(len(groups)), [group.label for group in groups])
    for index, tick in enumerate(axis.get_yticklabels()):
        tick.set_color(run_colour(index) if len(groups) > 1 else colour("ink"))
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _mean_of(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each name over the tables that have it."""
    found = {name: [table[name] for table in tables if name in table] for table in tables for name in table}
    return {name: sum(values) / len(values) for name, values in found.items()}
