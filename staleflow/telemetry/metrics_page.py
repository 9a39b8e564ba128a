"""The catalogue as a Markdown text: what `staleflow metrics` prints and docs/metrics.md is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from staleflow.telemetry.catalogue import AXES, CATALOGUE, FOREIGN
from staleflow.telemetry.metric import PLACEHOLDERS, Metric

_HEADER = f"""\
# Metrics

Every metric of `metrics.jsonl`, made from `staleflow/telemetry/catalogue.py` by `staleflow metrics`.

A line of the file is one row. The column `rows` says which kinds of row have the metric:

- `train`: one a training step; drawn over `{AXES["train"]}`;
- `eval`: one an evaluated weight version; drawn over `{AXES["eval"]}`;
- `instances`: a sample of the rollout instances and the trainer; drawn over `{AXES["instances"]}`;
- `event`: something that happened;
- `summary`: the last row of an attempt, with totals of the attempt.

The column `over rows` says what the values of several rows come to: their sum, their mean (weighted by a
metric where one is named), the largest, the smallest or the last. A train row counts what happened since
the row before. The report shows runs that differ only in their seed as the median, the least and the most.

A trainer of your own may return metrics of its own; their names begin with `{FOREIGN.section}/`.

In angle brackets:

"""
_HEADS = ("metric", "unit", "rows", "over rows", "meaning")


def metrics_page() -> str:
    """The whole page."""
    places = "".join(f"- `<{name}>`: {meaning};\n" for name, (_, meaning) in PLACEHOLDERS.items())
    sections = groupby(CATALOGUE.values(), key=lambda metric: metric.section)
    return _HEADER + places[:-2] + ".\n" + "".join(_section(name, tuple(of)) for name, of in sections)


def _section(name: str, metrics: Sequence[Metric]) -> str:
    lines = [_HEADS, *map(_cells, metrics)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS) - 1)]
    rule = "|".join("-" * (width + 2) for width in (*widths, len(_HEADS[-1])))
    head, *body = (_line(line, widths) for line in lines)
    return f"\n## {name}\n\n" + "\n".join((head, f"|{rule}|", *body)) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join((*_padded(cells, widths), cells[-1])) + " |"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    return (cell.ljust(width) for cell, width in zip(cells, widths, strict=False))


def _cells(metric: Metric) -> tuple[str, ...]:
    over: str = "" if metric.over_steps == "none" else metric.over_steps
    if metric.weight:
        over += f" by `{metric.weight}`"
    meaning = metric.meaning.replace("|", "\\|")
    return f"`{metric.name}`", metric.unit, ", ".join(metric.kinds), over, meaning
