"""The one set-up of matplotlib for figures, and their SVG: part of the page, or a file that stands by itself.

- A figure of the page is drawn in stand-in colours, each of which becomes a CSS variable of the page: one SVG
  serves light, dark and print.
- Text stays text, in the page's font: small files, and words that can be searched.
- The same data gives the same bytes: ids are salted by the figure's name, and no date is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

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
_STAND_IN = re.compile(r"#0a01([0-9a-f]{2})")
_FONT = re.compile(r"font: (\d+ )?([\d.]+px) [^;]*")
"""Weight and size; the family is left to the page."""
_REFERENCE = re.compile(r"url\(#([^)]*)\)")

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
    "text.parse_math": False,  # a run's name may contain dollar signs
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}
_STANDALONE_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": "line",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "figure.facecolor": "white",
    "legend.frameon": False,
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
    target = io.BytesIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(target, metadata=nothing)  # type: ignore[no-untyped-call]
    root = ElementTree.fromstring(target.getvalue())
    elements = list(root.iter())
    for element in elements:
        _without_namespaces(element)
    _own_ids(elements, name)
    for size in ("width", "height"):
        del root.attrib[size]  # the page sets them
    root.attrib |= {"role": "img", "aria-label": description}
    svg = ElementTree.tostring(root, encoding="unicode")
    return _STAND_IN.sub(lambda m: f"var(--{_NAMES[int(m[1], 16)]})", svg)


def standalone_svg(name: str, width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """Return a file of so many inches, with colours and a background of its own, as `draw` fills it."""
    target = io.StringIO()
    with matplotlib.rc_context({**_STANDALONE_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return target.getvalue()


def _without_namespaces(element: ElementTree.Element) -> None:
    """Name things as HTML does, and drop the line breaks and the font's family."""
    element.tag = element.tag.rpartition("}")[2]
    element.attrib = {
        key.rpartition("}")[2]: value.replace("\n", "") for key, value in element.attrib.items()
    }
    if "style" in element.attrib:
        element.attrib["style"] = _FONT.sub(_font, element.attrib["style"])
    element.tail = None
    if not (element.text or "").strip():
        element.text = None


def _font(found: re.Match[str]) -> str:
    return f"font-size: {found[2]}" + (f"; font-weight: {found[1].strip()}" if found[1] else "")


def _own_ids(elements: Sequence[ElementTree.Element], name: str) -> None:
    """Keep only ids that something refers to, and make them unique in the page."""
    used: set[str] = set()
    for element in elements:
        for key, value in element.attrib.items():
            if key == "href":
                used.add(value[1:])
                element.attrib[key] = f"#{name}-{value[1:]}"
            elif "url(#" in value:
                used.update(_REFERENCE.findall(value))
                element.attrib[key] = _REFERENCE.sub(rf"url(#{name}-\1)", value)
    for element in elements:
        own = element.attrib.pop("id", None)
        if own in used:
            element.attrib["id"] = f"{name}-{own}"
