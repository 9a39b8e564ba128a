"""The report's page: one HTML file without network or script, made from the templates beside this module.

The templates escape whatever comes from a run; only the figures are inserted as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from staleflow.reporting import bars, figures, timeline
from staleflow.reporting.comparison import DROPPED, KEY_MEASURES, ComparedRow, against, audit_text, compare
from staleflow.reporting.format import (
    ABSENT,
    clock,
    count,
    share,
    times,
    whole,
)
from staleflow.reporting.groups import RunGroup, group_runs
from staleflow.reporting.headline import TOKEN_FATES, Headline
from staleflow.reporting.load import AuditSummary, RunData, bound_rates
from staleflow.reporting.svg import RUN_COLOURS

EVENTS_SHOWN = 200
"""The last events of a run that a report lists; metrics.jsonl has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRun:
    """What the page of a single run has and a comparison has not."""

    facts: tuple[str, ...]
    stats: tuple[tuple[str, str, str], ...]
    """Value, name and note."""
    audit: AuditSummary
    dropped: tuple[ComparedRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The simulated machines of a group."""

    place: int
    text: str
    rate: float | None
    limits: tuple[float | None, ...]
    """Of rollout, trainer and latency, in trained tokens/s."""


def page(runs: Sequence[RunData]) -> str:
    """Return the HTML document for one run, or for several side by side, grouped by seed."""
    groups, several = group_runs(runs), len(runs) > 1
    rows = compare(groups)
    title = f"{len(runs)} runs compared" if several else runs[0].name
    if 1 < len(groups) < len(runs):
        title = f"{len(groups)} settings compared, {len(runs)} runs"
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=title,
            groups=groups,
            one=None if several else _one(groups[0], rows),
            seeded=len(groups) < len(runs),
            runs=[
                (place, seed, run)
                for place, group in enumerate(groups)
                for seed, run in enumerate(group.runs)
            ],
            sections=[(name, list(part)) for name, part in groupby(rows, lambda row: row.measure.section)],
            key_rows=[row for row in rows if row.measure.name in KEY_MEASURES],
            relative=against(groups),
            audits=[audit_text(group) for group in groups],
            machines=_machines(groups),
            charts={name: _inline(chart) for name, chart in _charts(groups, several).items()},
        )
    )


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("staleflow.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clock": clock,
        "count_text": count,
        "share": share,
        "times": times,
        "whole": whole,
    }
    environment.globals |= {
        "events_shown": EVENTS_SHOWN,
        "fates": TOKEN_FATES,
        "run_colours": RUN_COLOURS,
    }
    return environment


def _charts(groups: Sequence[RunGroup], several: bool) -> dict[str, Any]:
    """SVG by name, None where no run has the data; for `buffers` and `instances` one per group."""
    sampled_and_trained = figures.sampled_and_trained(groups)
    return {
        "throughput": bars.throughput(groups) if several else None,
        "accuracy": figures.accuracy(groups, over_time=False),
        "accuracy_over_time": figures.accuracy(groups, over_time=True),
        "reward": figures.reward(groups),
        "response_lengths": figures.response_lengths(groups),
        "signals": figures.signals(groups),
        "staleness": figures.staleness(groups),
        "buffers": [timeline.buffers(group.runs[0], place) for place, group in enumerate(groups)],
        "trainer_time": bars.trainer_time(groups),
        "instance_time": bars.instance_time(groups),
        "timings": bars.timings(groups),
        "token_fates": bars.token_fates(groups, half=sampled_and_trained is not None),
        "sampled_and_trained": sampled_and_trained,
        "instances": [timeline.instances(group.runs[0], place) for place, group in enumerate(groups)],
    }


def _inline(chart: Any) -> Any:
    if isinstance(chart, list):
        return [_inline(one) for one in chart]
    return chart if chart is None else Markup(chart)  # matplotlib escaped its texts


def _one(group: RunGroup, rows: Sequence[ComparedRow]) -> OneRun:
    run, n = group.runs[0], group.numbers[0]
    facts = (
        "simulated" if run.simulation else "",
        f"policy {n.policy}" if n.policy else "",
        f"η = {n.bound}" if n.bound is not None else "",
        n.reason,
    )
    return OneRun(
        facts=tuple(fact for fact in facts if fact),
        stats=_stats(run, n),
        audit=run.audit,
        dropped=tuple(row for row in rows if row.measure.section == DROPPED),
    )


def _stats(run: RunData, n: Headline) -> tuple[tuple[str, str, str], ...]:
    planned = f"of {n.planned}" if n.planned is not None and n.planned != n.steps else "training steps"
    change = ""
    if n.first_accuracy is not None and n.last_accuracy is not None:
        change = f"{100 * (n.last_accuracy - n.first_accuracy):+.1f} points"
    bound = "η unknown" if n.bound is None else f"η = {n.bound}"
    mean = "no trained trajectories" if n.staleness_mean is None else f"mean {n.staleness_mean:.2f}"
    real_s = run.summary.get("simulation/wall_s") if run.simulation else None
    real = "" if real_s is None else f"simulated in {clock(real_s)}"
    return (
        (str(n.steps), "steps", planned),
        (clock(n.seconds), "simulated time" if run.simulation else "wall time", real),
        (whole(n.tokens_per_s), "trained tokens/s", ""),
        (ABSENT if n.staleness_max is None else str(n.staleness_max), f"max staleness, {bound}", mean),
        (_accuracy(n), "sampled accuracy", change),
    )


def _accuracy(n: Headline) -> str:
    """`0.530 → 0.700`, or the only value."""
    if n.first_accuracy is None or n.last_accuracy is None:
        return ABSENT
    first = "" if n.first_version == n.last_version else f"{n.first_accuracy:.3f} → "
    return f"{first}{n.last_accuracy:.3f}"


def _machines(groups: Sequence[RunGroup]) -> list[Machines]:
    """Those of the simulated groups."""
    found = []
    for place, group in enumerate(groups):
        simulation = group.runs[0].simulation
        if not simulation:
            continue
        about = [str(simulation.get("costs", "")), f"{simulation.get('instances')} instances"]
        gpus = simulation.get("gpus")
        if isinstance(gpus, dict) and gpus.get("shared"):
            about.append(f"{gpus.get('rollout')} GPUs for both sides in turn")
        elif isinstance(gpus, dict):
            about.append(f"{gpus.get('rollout')} GPUs generate, {gpus.get('training')} train")
        limits = bound_rates(group.runs[0])
        found.append(
            Machines(
                place=place,
                text=", ".join(about),
                rate=group.numbers[0].tokens_per_s,
                limits=tuple(limits.get(side) for side in ("rollout", "trainer", "latency")),
            )
        )
    return found
