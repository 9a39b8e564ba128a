"""Figures that compare runs: one colour a run, the same everywhere.

Each function returns an `<svg>` element, or None where no run has the data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from staleflow.reporting.headline import TOKEN_FATES, accuracy_name, headline, mean_timings
from staleflow.reporting.load import RunData, series
from staleflow.reporting.svg import colour, new_figure, run_colour, to_svg

HALF = (5.0, 2.5)
"""Inches of a figure that takes half the page's width."""
FULL_WIDTH = 10.2
"""Inches of a figure that takes all of it."""
SMOOTH_FROM = 30
"""With fewer points than this, the points themselves are the curve."""

SIGNALS = (
    ("train/loss", "loss"),
    ("train/grad_norm", "gradient norm"),
    ("train/entropy", "entropy"),
    ("train/kl", "KL to the behaviour policy"),
    ("train/clip_frac", "clipped share"),
    ("train/logprob_abs_diff", "|log-prob difference|"),
    ("rollout/tokens_per_s", "generated tokens/s"),
    ("rollout/response_len_mean", "mean response length"),
)
TIMING_ORDER = ("wait_for_batch", "update", "push", "pull", "reward", "save")
FATE_COLOURS = {
    "trained": "ok",
    "filtered": "warn",
    "aborted": "bad",
    "discarded": "part3",
    "in_flight": "busy",
}


def accuracy(runs: Sequence[RunData], *, over_time: bool) -> str | None:
    """Draw sampled accuracy over weight versions or over minutes; of a single run the greedy one too, dotted.

    With several runs only what is compared is drawn: greedy curves, far above, would flatten the rest.
    """
    x = "run/seconds" if over_time else "eval/weight_version"
    figure, (axis,) = new_figure(*HALF)
    drawn, alone = False, len(runs) == 1 and not over_time
    for index, run in enumerate(runs):
        sampled = accuracy_name(run)
        greedy = (
            sorted({k for row in run.evals for k in row if k.endswith("_greedy/avg@1")})[:1] if alone else []
        )
        for name, style, width in ((sampled, "-", 1.7), *((g, ":", 1.1) for g in greedy)):
            xs, ys = series(run.evals, x, name) if name else ([], [])
            xs = [value / 60 for value in xs] if over_time else xs
            axis.plot(xs, ys, style, color=run_colour(index), linewidth=width, marker="o", markersize=2.6)
            drawn = drawn or bool(xs)
    if not drawn:
        return None
    axis.set_xlabel("minutes" if over_time else "weight version")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _whole_ticks(axis, x=not over_time)
    return to_svg(figure, f"accuracy-{'time' if over_time else 'version'}", "held-out accuracy")


def reward(runs: Sequence[RunData]) -> str | None:
    """Draw the mean reward of each step, smoothed over the raw values."""
    figure, (axis,) = new_figure(*HALF)
    if not _curves(axis, runs, "rollout/reward_mean"):
        return None
    axis.set_xlabel("training step")
    _whole_ticks(axis)
    return to_svg(figure, "reward", "mean reward by training step")


def staleness(runs: Sequence[RunData]) -> str | None:
    """Draw the share of trained trajectories by staleness, from the ledger; a dashed line marks η."""
    runs_with = [(i, run) for i, run in enumerate(runs) if run.trained]
    if not runs_with:
        return None
    figure, (axis,) = new_figure(*HALF)
    width = 0.8 / len(runs_with)
    reach = 1
    for place, (index, run) in enumerate(runs_with):
        lags = Counter(t.staleness for t in run.trained)
        shift = (place - (len(runs_with) - 1) / 2) * width
        total = len(run.trained)
        axis.bar(
            [lag + shift for lag in sorted(lags)],
            [lags[lag] / total for lag in sorted(lags)],
            width * 0.9,
            color=run_colour(index),
        )
        bound = headline(run).bound
        if bound is not None:
            axis.axvline(bound + 0.46, color=run_colour(index), linestyle="--", linewidth=1.0)
        reach = max(reach, max(lags), bound or 0)
    axis.set_xlim(min(-0.6, min(t.staleness for _, r in runs_with for t in r.trained) - 0.6), reach + 0.6)
    axis.set_xlabel("staleness: step minus oldest version (dashed: η)")
    axis.set_ylabel("share of trajectories")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.grid(axis="x", visible=False)
    _whole_ticks(axis)
    return to_svg(figure, "staleness", "staleness of trained trajectories")


def response_lengths(runs: Sequence[RunData]) -> str | None:
    """Draw the distribution of generated tokens per trained trajectory, with its median."""
    longest = max((t.tokens for run in runs for t in run.trained), default=0)
    if longest == 0:
        return None
    figure, (axis,) = new_figure(*HALF)
    bins = min(40, longest)
    step = math.ceil(longest / bins)
    edges = [i * step for i in range(longest // step + 2)]
    for index, run in enumerate(runs):
        if not run.trained:
            continue
        counts = Counter(t.tokens // step for t in run.trained)
        shares = [counts[i] / len(run.trained) for i in range(len(edges) - 1)]
        axis.stairs(shares, edges, color=run_colour(index), linewidth=1.4)
        if len(runs) == 1:
            axis.stairs(shares, edges, color=run_colour(index), alpha=0.12, fill=True)
        median = sorted(t.tokens for t in run.trained)[len(run.trained) // 2]
        axis.axvline(median, color=run_colour(index), linestyle=":", linewidth=1.0)
    axis.set_xlim(0, edges[-1])
    axis.set_xlabel("generated tokens in a trained trajectory (dotted: median)")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return to_svg(figure, "lengths", "response lengths")


def timings(runs: Sequence[RunData]) -> str | None:
    """Draw the mean seconds of each part of a step. Parts overlap in an asynchronous run."""
    means = [mean_timings(run) for run in runs]
    present = {name for values in means for name in values}
    names = [n for n in TIMING_ORDER if n in present] + sorted(present - set(TIMING_ORDER))
    if not names:
        return None
    rows = [(name, f"part{min(i, 5)}", [m.get(name, 0.0) for m in means]) for i, name in enumerate(names)]
    return _stacked(runs, rows, "timings", "mean seconds a step", percent=False, width=HALF[0])


def token_fates(runs: Sequence[RunData]) -> str | None:
    """Draw what became of the generated tokens, as shares."""
    balances = [headline(run).tokens for run in runs]
    if not any(balance and balance.generated for balance in balances):
        return None
    rows = [
        (
            fate,
            FATE_COLOURS[fate],
            [b.fates[fate] / b.generated if b and b.generated else 0.0 for b in balances],
        )
        for fate in TOKEN_FATES
    ]
    return _stacked(runs, rows, "tokens", "share of generated tokens", percent=True, width=FULL_WIDTH)


def signals(runs: Sequence[RunData]) -> str | None:
    """Draw small curves of what the trainer measured, those that any run has."""
    present = [(k, title) for k, title in SIGNALS if any(k in row for run in runs for row in run.train)]
    if not present:
        return None
    columns = min(4, len(present))
    rows = math.ceil(len(present) / columns)
    figure, axes = new_figure(2.6 * columns, 1.65 * rows, rows, columns)
    for axis, (key, title) in zip(axes, present, strict=False):
        _curves(axis, runs, key)
        axis.set_title(title, fontsize=8.5, fontweight="bold", loc="left", color=colour("ink"))
        axis.tick_params(labelsize=7)
        _whole_ticks(axis)
    for axis in axes[len(present) :]:
        axis.set_visible(False)
    return to_svg(figure, "signals", "training signals by step")


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred running mean over about a 20th of the curve; short curves as they are."""
    if len(values) < SMOOTH_FROM:
        return list(values)
    reach = max(1, len(values) // 40)
    spans = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _curves(axis: Axes, runs: Sequence[RunData], key: str) -> bool:
    drawn = False
    for index, run in enumerate(runs):
        xs, ys = series(run.train, "train/step", key)
        if len(xs) >= SMOOTH_FROM:
            axis.plot(xs, ys, color=run_colour(index), alpha=0.22, linewidth=0.8)
        axis.plot(xs, smooth(ys), color=run_colour(index), marker="o" if len(xs) == 1 else "")
        drawn = drawn or bool(xs)
    return drawn


def _stacked(
    runs: Sequence[RunData],
    rows: Sequence[tuple[str, str, Sequence[float]]],
    name: str,
    label: str,
    *,
    percent: bool,
    width: float,
) -> str:
    """Draw one horizontal bar a run, made of named parts."""
    figure, (axis,) = new_figure(width, 0.95 + 0.3 * len(runs))
    left = [0.0] * len(runs)
    places = list(range(len(runs)))
    for part, variable, values in rows:
        axis.barh(places, values, 0.62, left=left, color=colour(variable), label=part.replace("_", " "))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.set_yticks(places, [run.name for run in runs])
    for index, tick in enumerate(axis.get_yticklabels()):
        tick.set_color(run_colour(index) if len(runs) > 1 else colour("ink"))
    axis.set_ylim(len(runs) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(label)
    if percent:
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(
        loc="outside upper left", ncols=6, handlelength=0.9, handleheight=0.9, columnspacing=1.2,
        frameon=False, fontsize=7.5, labelcolor=colour("muted"),
    )  # fmt: skip
    return to_svg(figure, name, label)


def _whole_ticks(axis: Axes, *, x: bool = True) -> None:
    if x:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
