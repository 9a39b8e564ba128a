"""Matplotlib figures as inline SVG that follows the page's colours and font.

- A figure is drawn in stand-in colours, each of which becomes a CSS variable of the page: one SVG
  serves light, dark and print.
- Text stays text, in the page's font: small files, and words that can be searched.
- The same data gives the same bytes: ids are salted by the figure's name, and no date is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HALF = (5.0, 2.5)
"""Inches of a figure that takes half the page's width."""
FULL_WIDTH = 10.2
"""Inches of a figure that takes all of it."""
RUN_COLOURS = 8
"""Runs beyond the eighth share colours with the first ones."""

_NAMES = (
    "ink", "muted", "line", "card", "ok", "warn", "bad", "busy",
    *(f"run{i}" for i in range(RUN_COLOURS)), *(f"part{i}" for i in range(6)),
)  # fmt: skip
_STAND_INS = {name: f"#0a01{i:02x}" for i, name in enumerate(_NAMES)}

_STYLE: Any = {  # any: matplotlib types the keys as a closed set of literals
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.edgecolor": _STAND_INS["line"],
    "axes.labelcolor": _STAND_INS["muted"],
    "axes.titlecolor": _STAND_INS["ink"],
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _STAND_INS["line"],
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "text.color": _STAND_INS["ink"],
    "xtick.color": _STAND_INS["muted"],
    "ytick.color": _STAND_INS["muted"],
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.5,
    "text.parse_math": False,  # a run may be called what$ever$ it likes
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


def colour(name: str) -> str:
    """Return the stand-in for a CSS variable of the page: `ink`, `muted`, `ok`, `run0`, `part0`, ..."""
    return _STAND_INS[name]


def run_colour(index: int) -> str:
    """Return the colour of the run at this place; the same in every figure and table."""
    return _STAND_INS[f"run{index % RUN_COLOURS}"]


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, *, ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many inches and its axes, row by row, sharing x within a column of `ratios`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(
            rows, columns, squeeze=False, sharex="col" if ratios else False,
            gridspec_kw={"height_ratios": ratios} if ratios else None,
        )  # fmt: skip
    return figure, [axis for row in axes for axis in row]


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return the figure as one `<svg>` element without references to anything outside."""
    target = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = _own_ids(svg, name)
    for variable, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "inherit", svg)
    svg = re.sub(r"font: ([^;\"]*?)([\d.]+px) inherit", r"font-size: \2; \1", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)
    return re.sub(r"\n\s*", "\n", svg).strip()


def _own_ids(svg: str, name: str) -> str:
    """Keep only ids that something refers to, and make them unique in the page."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda m: f"{m[1]}{name}-{m[2]}", svg)
