"""What simulated runs were reckoned with, and the bounds that no policy exceeds on it: a part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from staleflow.reporting.format import whole
from staleflow.reporting.groups import RunGroup
from staleflow.reporting.headline import ABSENT
from staleflow.reporting.load import bound_rates

_SIDES = {"rollout": "rollout peak", "trainer": "trainer peak", "latency": "latency bound"}


def machines(groups: Sequence[RunGroup], names: Sequence[str]) -> str:
    """Return a table of the simulated ones, each with its name as HTML; empty where all runs are real."""
    lines = []
    for group, name in zip(groups, names, strict=True):
        run, n = group.runs[0], group.numbers[0]
        if not run.simulation:
            continue
        bounds = bound_rates(run)
        cells = "".join(f"<td>{_bound_cell(bounds.get(side), n.tokens_per_s)}</td>" for side in _SIDES)
        about = [str(run.simulation.get("costs", "")), f"{run.simulation.get('instances')} instances"]
        gpus = run.simulation.get("gpus")
        if isinstance(gpus, dict) and gpus.get("shared"):
            about.append(f"{gpus.get('rollout')} GPUs for both sides in turn")
        elif isinstance(gpus, dict):
            about.append(f"{gpus.get('rollout')} GPUs generate, {gpus.get('training')} train")
        text = escape(", ".join(about))
        lines.append(
            f'<tr><td>{name}</td><td class="text">{text}</td><td>{whole(n.tokens_per_s)}</td>{cells}</tr>'
        )
    if not lines:
        return ""
    columns = ("", "costs", "trained tokens/s", *_SIDES.values())
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    note = (
        "No model ran: durations come from the costs named. Peaks in trained tokens/s, and the share of each "
        "that was reached; rollout: all instances decode at their best batch size; trainer: it never "
        "waits; latency: the longest response of a batch within &eta;&nbsp;+&nbsp;1 steps."
    )
    if any(len(group.runs) > 1 for group in groups):
        note += " Of each group, its first seed."
    return f'<h2>Simulated machines</h2><div class="card scroll">{table}<p class="note">{note}</p></div>'


def _bound_cell(bound: float | None, rate: float | None) -> str:
    if bound is None:
        return ABSENT
    return whole(bound) + (f"<small>{rate / bound:.0%}</small>" if rate else "")
