"""Figures of one run over time: activity of instances and trainer, and occupancy of the buffers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from staleflow.reporting.load import RunData, Values, series, setting
from staleflow.reporting.svg import colour, new_figure, run_colour, to_svg
from staleflow.reporting.utilization import idle_share, instance_names

MAX_TRACKS = 24
"""Of more instances, those that idled most are drawn."""
MAX_POINTS = 600
"""Samples drawn per track: more than a page has pixels would only enlarge the file."""


def instances(run: RunData, index: int) -> str | None:
    """Draw running trajectories of each instance, the trainer's busy time, and the versions below.

    A gap in a track is idle time; a tick is a pull.
    """
    names = instance_names(run)
    if not names:
        return None
    if len(names) > MAX_TRACKS:
        names = sorted(names, key=lambda name: -(idle_share(run, name) or 0.0))[:MAX_TRACKS]
    rows = _thin(run.instances)
    tracks = len(names) + 1
    height = max(0.24, min(0.4, 5.0 / tracks))
    figure, (top, bottom) = new_figure(10.2, 1.7 + height * tracks, 2, ratios=[height * tracks, 1.0])
    most = max((row.get(f"instance/{n}/running", 0) for row in rows for n in names), default=1) or 1
    for place, name in enumerate(names):
        _track(top, rows, name, place, most, index)
        _versions(bottom, rows, name)
    _trainer(top, rows, len(names))
    xs, versions = series(run.train, "run/seconds", "train/step")
    bottom.step(
        [x / 60 for x in xs], [v + 1 for v in versions], where="post", color=colour("ink"), linewidth=1.2
    )
    labels = [f"{name} · idle {idle_share(run, name) or 0.0:.0%}" for name in names]
    top.set_yticks([p + 0.4 for p in range(tracks)], [*labels, "trainer"])
    top.set_ylim(tracks, -0.15)
    top.grid(axis="y", visible=False)
    bottom.set_xlabel("minutes")
    bottom.set_ylabel("version")
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    bottom.set_xlim(0, max((row["run/seconds"] for row in rows), default=0.0) / 60 or 1.0)
    return to_svg(figure, f"instances{index}", "instances over time")


def buffers(run: RunData, index: int) -> str | None:
    """Draw each staleness buffer, by offset from the next step: occupied solid, reserved pale."""
    offsets = sorted({int(k.split("/")[1]) for row in run.train for k in row if k.startswith("buffer/")})
    if not offsets:
        return None
    figure, (axis,) = new_figure(5.0, 0.8 + 0.42 * len(offsets))
    capacity = _capacity(run, offsets)
    for offset in offsets:
        rows = [row for row in _thin(run.train) if f"buffer/{offset}/occupied" in row]
        xs = [row["train/step"] for row in rows]
        base = [offset + 0.85] * len(rows)
        occupied = [0.8 * row[f"buffer/{offset}/occupied"] / capacity for row in rows]
        reserved = [0.8 * row.get(f"buffer/{offset}/reserved", 0) / capacity for row in rows]
        solid = [b - o for b, o in zip(base, occupied, strict=True)]
        full = [s - r for s, r in zip(solid, reserved, strict=True)]
        axis.axhspan(offset + 0.05, offset + 0.85, color=colour("line"), alpha=0.45, linewidth=0)
        axis.fill_between(xs, base, solid, step="mid", color=run_colour(index), linewidth=0)
        axis.fill_between(xs, solid, full, step="mid", color=run_colour(index), alpha=0.35, linewidth=0)
    axis.set_yticks([o + 0.45 for o in offsets], [f"+{o}" for o in offsets])
    axis.set_ylim(len(offsets), 0)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("training step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return to_svg(figure, f"buffers{index}", "buffer occupancy by offset")


def _track(axis: Axes, rows: Sequence[Values], name: str, place: int, most: float, index: int) -> None:
    """Draw one instance between the heights `place` and `place + 0.8`."""
    here = [row for row in rows if f"instance/{name}/running" in row]
    xs = [row["run/seconds"] / 60 for row in here]
    tops = [place + 0.8 - 0.8 * row[f"instance/{name}/running"] / most for row in here]
    axis.axhspan(place, place + 0.8, color=colour("line"), alpha=0.45, linewidth=0)
    axis.fill_between(
        xs, [place + 0.8] * len(xs), tops, step="post", color=run_colour(index), alpha=0.75, linewidth=0
    )
    versions = [row.get(f"instance/{name}/version") for row in here]
    pulls = [x for x, now, before in zip(xs[1:], versions[1:], versions, strict=False) if now != before]
    axis.vlines(pulls, place, place + 0.8, color=colour("ink"), linewidth=0.6, alpha=0.6)


def _versions(axis: Axes, rows: Sequence[Values], name: str) -> None:
    xs, versions = series(rows, "run/seconds", f"instance/{name}/version")
    axis.step([x / 60 for x in xs], versions, where="post", color=colour("muted"), linewidth=0.8)


def _trainer(axis: Axes, rows: Sequence[Values], place: int) -> None:
    """Draw the trainer's busy samples as a band."""
    xs, busy = series(rows, "run/seconds", "trainer/busy")
    axis.axhspan(place, place + 0.8, color=colour("line"), alpha=0.45, linewidth=0)
    axis.fill_between(
        [x / 60 for x in xs], [place + 0.8] * len(xs), [place + 0.8 - 0.8 * b for b in busy],
        step="post", color=colour("busy"), linewidth=0,
    )  # fmt: skip


def _capacity(run: RunData, offsets: Sequence[int]) -> float:
    """Groups in a full buffer: the batch size, or the fullest one seen."""
    batch_size = setting(run.config, "data", "batch_size")
    if isinstance(batch_size, int) and batch_size > 0:
        return float(batch_size)
    fullest = max(
        (
            row.get(f"buffer/{o}/occupied", 0) + row.get(f"buffer/{o}/reserved", 0)
            for row in run.train
            for o in offsets
        ),
        default=1,
    )
    return float(fullest) or 1.0


def _thin(rows: Sequence[Values]) -> Sequence[Values]:
    """Keep at most MAX_POINTS rows, evenly, the last one included."""
    if len(rows) <= MAX_POINTS:
        return rows
    stride = len(rows) / MAX_POINTS
    return [*(rows[int(i * stride)] for i in range(MAX_POINTS)), rows[-1]]
