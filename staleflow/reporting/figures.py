"""Curves and distributions that compare groups of runs, in one colour per group.

Each function returns an `<svg>` element, or None if no run has the data. A single run is a group of one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from staleflow.reporting.groups import RunGroup
from staleflow.reporting.headline import Kind, accuracy_name, length_counts
from staleflow.reporting.load import RunData, TrainedRow, Values, series
from staleflow.reporting.svg import FULL_WIDTH, HALF, colour, new_figure, run_colour, to_svg
from staleflow.telemetry.catalogue import CATALOGUE

SEED_ALPHA = 0.3
"""Opacity of the runs of a group, drawn behind their mean."""
SMOOTH_FROM = 30
"""A curve of fewer points is not smoothed."""
SIGNAL_COLUMNS = 4

SIGNALS = [(metric.name, metric.title) for metric in CATALOGUE.values() if metric.curve]
"""Curves of the report: what the catalogue says is one."""


def accuracy(groups: Sequence[RunGroup], *, over_time: bool) -> str | None:
    """Draw sampled accuracy over weight versions or over minutes.

    For a single run, greedy accuracy is dotted and pass@k for its largest k dashed. With several runs only
    sampled accuracy is drawn: the greedy curves lie far above and would flatten the rest.
    """
    x = "run/seconds" if over_time else "eval/weight_version"
    figure, (axis,) = new_figure(*HALF)
    drawn, alone = False, len(groups) == len(groups[0].runs) == 1 and not over_time
    for index, group in enumerate(groups):
        faint = 1.0 if len(group.runs) == 1 else 0.6 if over_time else SEED_ALPHA
        for run in group.runs:
            sampled = accuracy_name(run)
            beside = [(name, style, 1.1) for name, style in _beside(run)] if alone else []
            for name, style, width in ((sampled, "-", 1.7), *beside):
                xs, ys = series(run.evals, x, name) if name else ([], [])
                xs = [value / 60 for value in xs] if over_time else xs
                axis.plot(
                    xs, ys, style, color=run_colour(index), linewidth=width, marker="o", markersize=2.6,
                    alpha=faint,
                )  # fmt: skip
                drawn = drawn or bool(xs)
        if faint < 1.0 and not over_time:
            _middle(axis, index, [_points(run.evals, x, accuracy_name(run)) for run in group.runs])
    if not drawn:
        return None
    axis.set_xlabel("minutes" if over_time else "weight version")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _whole_ticks(axis, x=not over_time)
    return to_svg(figure, f"accuracy-{'time' if over_time else 'version'}", "held-out accuracy")


def _beside(run: RunData) -> list[tuple[str, str]]:
    """Metrics drawn beside sampled accuracy, with line styles: greedy accuracy and the largest pass@k."""
    names = {key for row in run.evals for key in row}
    greedy = sorted(name for name in names if name.endswith("_greedy/avg@1"))[:1]
    passed = sorted((name for name in names if "/pass@" in name), key=lambda n: int(n.rpartition("@")[2]))[
        -1:
    ]
    return [(name, ":") for name in greedy] + [(name, "--") for name in passed]


def reward(groups: Sequence[RunGroup]) -> str | None:
    """Draw the mean reward of each step: raw, and smoothed on top."""
    figure, (axis,) = new_figure(*HALF)
    if not _curves(axis, groups, "rollout/reward_mean"):
        return None
    axis.set_xlabel("training step")
    _whole_ticks(axis)
    return to_svg(figure, "reward", "mean reward by training step")


def staleness(groups: Sequence[RunGroup]) -> str | None:
    """Draw the share of trained trajectories by staleness, from the ledger; a dashed line marks η."""
    with_data = [(i, group, trained) for i, group in enumerate(groups) if (trained := _trained(group))]
    if not with_data:
        return None
    figure, (axis,) = new_figure(*HALF)
    width = 0.8 / len(with_data)
    reach = 1
    for place, (index, group, trained) in enumerate(with_data):
        lags = Counter(t.staleness for t in trained)
        shift = (place - (len(with_data) - 1) / 2) * width
        axis.bar(
            [lag + shift for lag in sorted(lags)],
            [lags[lag] / len(trained) for lag in sorted(lags)],
            width * 0.9,
            color=run_colour(index),
        )
        bound = group.numbers[0].bound
        if bound is not None:
            axis.axvline(bound + 0.46, color=run_colour(index), linestyle="--", linewidth=1.0)
        reach = max(reach, max(lags), bound or 0)
    axis.set_xlim(
        min(-0.6, min(t.staleness for *_, trained in with_data for t in trained) - 0.6), reach + 0.6
    )
    axis.set_xlabel("staleness: step minus oldest version (dashed: η)")
    axis.set_ylabel("share of trajectories")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(axis="x", visible=False)
    _whole_ticks(axis)
    return to_svg(figure, "staleness", "staleness of trained trajectories")


def response_lengths(groups: Sequence[RunGroup]) -> str | None:
    """Draw the distribution of generated tokens per trained trajectory, and its median."""
    longest = max((t.tokens for group in groups for t in _trained(group)), default=0)
    if longest == 0:
        return None
    figure, (axis,) = new_figure(*HALF)
    bins = min(40, longest)
    step = math.ceil(longest / bins)
    edges = [i * step for i in range(longest // step + 2)]
    for index, group in enumerate(groups):
        trained = _trained(group)
        if not trained:
            continue
        counts = Counter(t.tokens // step for t in trained)
        shares = [counts[i] / len(trained) for i in range(len(edges) - 1)]
        axis.stairs(shares, edges, color=run_colour(index), linewidth=1.4)
        if len(groups) == 1:
            axis.stairs(shares, edges, color=run_colour(index), alpha=0.12, fill=True)
        axis.axvline(median(t.tokens for t in trained), color=run_colour(index), linestyle=":", linewidth=1.0)
    axis.set_xlim(0, edges[-1])
    axis.set_xlabel("generated tokens in a trained trajectory (dotted: median)")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return to_svg(figure, "lengths", "response lengths")


def sampled_and_trained(groups: Sequence[RunGroup]) -> str | None:
    """Draw response lengths by power of two: of trained responses; dotted, of all sampled ones."""
    kinds: tuple[Kind, Kind] = ("sampled", "trained")
    counts = [[(kind, length_counts(group.runs, kind)) for kind in kinds] for group in groups]
    longest = max((bucket for of_group in counts for _, c in of_group for bucket in c), default=0)
    if longest == 0 or not any(c for of_group in counts for kind, c in of_group if kind == "sampled"):
        return None
    buckets = [0, *(1 << power for power in range(longest.bit_length()))]
    figure, (axis,) = new_figure(*HALF)
    for index, of_group in enumerate(counts):
        for kind, c in of_group:
            shares = [c[bucket] / (c.total() or 1) for bucket in buckets]
            axis.stairs(
                shares, color=run_colour(index), linewidth=1.0 if kind == "sampled" else 1.6,
                linestyle=":" if kind == "sampled" else "-",
            )  # fmt: skip
    first = next(i for i, b in enumerate(buckets) if any(c[b] for of_group in counts for _, c in of_group))
    axis.set_xticks([i + 0.5 for i in range(len(buckets))], [str(bucket) for bucket in buckets])
    axis.set_xlim(first, len(buckets))
    axis.grid(axis="x", visible=False)
    axis.set_xlabel("tokens, from each power of two to the next (dotted: sampled; solid: trained)")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return to_svg(figure, "sampled-trained", "response lengths, sampled and trained")


def signals(groups: Sequence[RunGroup]) -> str | None:
    """Draw a small curve of each training signal that any run has."""
    present = [
        (k, title)
        for k, title in SIGNALS
        if any(k in row for group in groups for run in group.runs for row in run.train)
    ]
    if not present:
        return None
    rows = math.ceil(len(present) / SIGNAL_COLUMNS)
    figure, axes = new_figure(FULL_WIDTH, 1.65 * rows, rows, SIGNAL_COLUMNS)
    for axis, (key, title) in zip(axes, present, strict=False):
        _curves(axis, groups, key)
        axis.set_title(title, fontsize=8.5, fontweight="bold", loc="left", color=colour("ink"))
        axis.tick_params(labelsize=7)
        _whole_ticks(axis)
    for axis in axes[len(present) :]:
        axis.set_visible(False)
    return to_svg(figure, "signals", "training signals by step")


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over about a 20th of the curve; a short curve unchanged."""
    if len(values) < SMOOTH_FROM:
        return list(values)
    reach = max(1, len(values) // 40)
    spans = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _curves(axis: Axes, groups: Sequence[RunGroup], key: str) -> bool:
    drawn = False
    for index, group in enumerate(groups):
        several = len(group.runs) > 1
        for run in group.runs:
            xs, ys = series(run.train, "train/step", key)
            if len(xs) >= SMOOTH_FROM and not several:
                axis.plot(xs, ys, color=run_colour(index), alpha=0.22, linewidth=0.8)
            axis.plot(
                xs, smooth(ys), color=run_colour(index), marker="o" if len(xs) == 1 else "",
                alpha=SEED_ALPHA if several else 1.0, linewidth=0.8 if several else 1.5,
            )  # fmt: skip
            drawn = drawn or bool(xs)
        if several:
            _middle(axis, index, [_points(run.train, "train/step", key) for run in group.runs])
    return drawn


def _middle(axis: Axes, index: int, curves: Sequence[dict[float, float]]) -> None:
    """Draw the mean over the seeds of a group, where all of them have a value."""
    xs = sorted(set.intersection(*map(set, curves)))
    axis.plot(
        xs, smooth([sum(curve[x] for curve in curves) / len(curves) for x in xs]),
        color=run_colour(index), linewidth=1.9,
    )  # fmt: skip


def _points(rows: Sequence[Values], x: str, y: str | None) -> dict[float, float]:
    return dict(zip(*series(rows, x, y), strict=True)) if y else {}


def _trained(group: RunGroup) -> list[TrainedRow]:
    return [t for run in group.runs for t in run.trained]


def _whole_ticks(axis: Axes, *, x: bool = True) -> None:
    if x:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
