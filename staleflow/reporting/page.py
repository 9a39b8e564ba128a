"""The report's page: one HTML file that needs nothing else, neither network nor script.

Everything that comes from a run is escaped before it becomes HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from staleflow.reporting import figures, timeline
from staleflow.reporting.headline import (
    ABSENT,
    TOKEN_FATES,
    Headline,
    bottleneck,
    config_differences,
    headline,
)
from staleflow.reporting.load import RunData, Verdict
from staleflow.reporting.style import CSS
from staleflow.reporting.svg import RUN_COLOURS
from staleflow.reporting.words import COLUMNS, accuracy_text, best_of, cells, clock, share, whole

EVENTS_SHOWN = 200
"""A report lists this many events of a run, the last ones; metrics.jsonl has all."""


def page(runs: Sequence[RunData]) -> str:
    """Return the whole HTML document for one run or several side by side."""
    numbers = [headline(run) for run in runs]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        f"<h1>{escape(title)}</h1>",
        _opening(runs, numbers),
        _learning(runs),
        _staleness(runs),
        _time(runs, numbers),
        _tokens(runs, numbers),
        _timelines(runs),
        _config(runs),
        _events(runs),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · staleflow</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(part + chr(10) for part in body if part)}</main></body></html>\n"
    )


def _opening(runs: Sequence[RunData], numbers: Sequence[Headline]) -> str:
    several = len(runs) > 1
    verdicts = "".join(
        f"<li>{_named(i, run) + ': ' if several else ''}{escape(bottleneck(n))}</li>"
        for i, (run, n) in enumerate(zip(runs, numbers, strict=True))
    )
    if not several:
        return (
            f'<div class="sub">{_subtitle(runs[0], numbers[0])}</div>{_stats(runs[0], numbers[0])}'
            f'<div class="card"><h3>What held it up</h3><ul class="verdicts">{verdicts}</ul></div>'
        )
    legend = "".join(f"<span>{_named(i, run)}</span>" for i, run in enumerate(runs))
    return (
        f'<div class="legend">{legend}</div>'
        f'<h2>Comparison</h2><div class="card scroll">{_comparison(runs, numbers)}</div>'
        f'<h2>What held them up</h2><div class="card"><ul class="verdicts">{verdicts}</ul></div>'
    )


def _subtitle(run: RunData, n: Headline) -> str:
    facts = [
        f"policy {n.policy}" if n.policy else "",
        f"η = {n.bound}" if n.bound is not None else "",
        n.reason,
    ]
    return escape(" · ".join(fact for fact in facts if fact))


def _stats(run: RunData, n: Headline) -> str:
    planned = f"of {n.planned}" if n.planned is not None and n.planned != n.steps else "training steps"
    change = None
    if n.first_accuracy is not None and n.last_accuracy is not None:
        change = n.last_accuracy - n.first_accuracy
    bound = "η unknown" if n.bound is None else f"η = {n.bound}"
    mean = "no trained trajectories" if n.staleness_mean is None else f"mean {n.staleness_mean:.2f}"
    stats = (
        (str(n.steps), "steps", planned),
        (clock(n.seconds), "wall time", ""),
        (whole(n.tokens_per_s), "trained tokens/s", ""),
        (ABSENT if n.staleness_max is None else str(n.staleness_max), f"max staleness, {bound}", mean),
        (accuracy_text(n), "sampled accuracy", "" if change is None else f"{100 * change:+.1f} points"),
    )
    cards = "".join(
        f'<div class="card stat"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
        for value, name, note in stats
    )
    audit = f'<span>audit of the ledger</span><div class="verdict">{_pill(run.verdict)}</div>'
    return f'<div class="stats">{cards}<div class="card stat">{audit}</div></div>'


def _comparison(runs: Sequence[RunData], numbers: Sequence[Headline]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("run", *COLUMNS, "audit"))
    best = best_of(numbers)
    lines = []
    for i, (run, n) in enumerate(zip(runs, numbers, strict=True)):
        values = "".join(
            f"<td{' class=best' if best.get(name) == i else ''}>{escape(value)}</td>"
            for name, value in zip(COLUMNS, cells(n), strict=True)
        )
        lines.append(f"<tr><td>{_named(i, run)}</td>{values}<td>{_pill(run.verdict)}</td></tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _learning(runs: Sequence[RunData]) -> str:
    cards = (
        _card(
            "Sampled held-out accuracy by weight version",
            figures.accuracy(runs, over_time=False),
            "Dotted: greedy." if len(runs) == 1 else "",
        ),
        _card("Sampled held-out accuracy over wall time", figures.accuracy(runs, over_time=True)),
        _card("Reward of the trained batch", figures.reward(runs)),
        _card("Response length", figures.response_lengths(runs)),
        _card("Training signals", figures.signals(runs), wide=True),
    )
    return f'<h2>Learning</h2><div class="grid">{"".join(cards)}</div>'


def _staleness(runs: Sequence[RunData]) -> str:
    note = "By offset from the next step; solid: occupied, pale: reserved."
    buffers = "".join(
        _card(f"Buffers{_of(run, runs)}", timeline.buffers(run, i), note) for i, run in enumerate(runs)
    )
    source = "Read off the tensors that were trained on, as the ledger has them."
    histogram = _card("Staleness of what was trained on", figures.staleness(runs), source)
    return f'<h2>Staleness</h2><div class="grid">{histogram}{buffers}</div>'


def _time(runs: Sequence[RunData], numbers: Sequence[Headline]) -> str:
    note = "Parts run at the same time in an asynchronous run, so they may sum to more than a step."
    head = "".join(f"<th>{name}</th>" for name in ("run", "trainer waited", "instances idle"))
    rows = "".join(
        f"<tr><td>{_named(i, run)}</td>"
        f"<td>{share(n.trainer_waiting)}</td><td>{share(n.instances_idle)}</td></tr>"
        for i, (run, n) in enumerate(zip(runs, numbers, strict=True))
    )
    waiting = f"<h3>Standing still</h3><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    timing = _card("Timing of a step", figures.timings(runs), note)
    return f'<h2>Time</h2><div class="grid">{timing}<div class="card">{waiting}</div></div>'


def _tokens(runs: Sequence[RunData], numbers: Sequence[Headline]) -> str:
    names = ("run", "generated", *(fate.replace("_", " ") for fate in TOKEN_FATES), "check")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for i, (run, n) in enumerate(zip(runs, numbers, strict=True)):
        name, balance = f"<td>{_named(i, run)}</td>", n.tokens
        if balance is None:
            lines.append(f'<tr>{name}<td colspan="{len(TOKEN_FATES) + 2}">not measured</td></tr>')
            continue
        fates = "".join(f"<td>{balance.fates[fate]:,}</td>" for fate in TOKEN_FATES)
        check = '<span class="ok-text">✓ balanced</span>'
        if balance.missing:
            what = "missing" if balance.missing > 0 else "too many"
            check = f'<span class="bad-text">✗ {abs(balance.missing):,} {what}</span>'
        lines.append(f"<tr>{name}<td>{balance.generated:,}</td>{fates}<td>{check}</td></tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    note = "Generated = trained + filtered + aborted + discarded + in flight."
    fates_card = _card("Where the tokens went", figures.token_fates(runs), wide=True)
    table_card = f'<div class="card wide scroll">{table}<p class="note">{note}</p></div>'
    return f'<h2>Tokens</h2><div class="grid">{fates_card}{table_card}</div>'


def _timelines(runs: Sequence[RunData]) -> str:
    note = (
        "Filled: trajectories running; a line across: a pull. "
        "Below: versions of the instances (grey) and of the trainer."
    )
    cards = "".join(
        _card(f"Instances over time{_of(run, runs)}", timeline.instances(run, i), note, wide=True)
        for i, run in enumerate(runs)
    )
    return f'<h2>Instances</h2><div class="grid">{cards}</div>'


def _config(runs: Sequence[RunData]) -> str:
    parts = []
    differences = config_differences(runs) if len(runs) > 1 else {}
    if len(runs) > 1:
        head = "".join(f"<th>{_named(i, run)}</th>" for i, run in enumerate(runs))
        lines = "".join(
            f"<tr><td><code>{escape(key)}</code></td>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
            for key, values in differences.items()
        )
        table = f"<table><thead><tr><th>key</th>{head}</tr></thead><tbody>{lines}</tbody></table>"
        body = table if differences else '<div class="empty">the configs are the same</div>'
        parts.append(f'<div class="card scroll"><h3>Differences</h3>{body}</div>')
    for i, run in enumerate(runs):
        text = escape(run.config_text) or "no config.yaml"
        parts.append(f"<details><summary>Config · {_named(i, run)}</summary><pre>{text}</pre></details>")
    return f"<h2>Config</h2>{''.join(parts)}"


def _events(runs: Sequence[RunData]) -> str:
    parts = []
    for i, run in enumerate(runs):
        if not run.events:
            continue
        lines = "".join(
            f"<tr><td>{escape(clock(event.get('run/seconds')))}</td>"
            f'<td class="text">{escape(str(event.get("event/name", "")))}</td>'
            f'<td class="text">{escape(str(event.get("event/text", "")))}</td></tr>'
            for event in run.events[-EVENTS_SHOWN:]
        )
        title = f"{len(run.events)} event{'' if len(run.events) == 1 else 's'} · {_named(i, run)}"
        parts.append(f"<details><summary>{title}</summary><table>{lines}</table></details>")
    return f"<h2>Events</h2>{''.join(parts)}" if parts else ""


def _card(title: str, svg: str | None, note: str = "", *, wide: bool = False) -> str:
    body = svg or '<div class="empty">not measured in this run</div>'
    foot = f'<p class="note">{note}</p>' if note and svg else ""
    return f'<div class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{body}{foot}</div>'


def _chip(index: int) -> str:
    return f'<span class="chip" style="background:var(--run{index % RUN_COLOURS})"></span>'


def _named(index: int, run: RunData) -> str:
    return f"{_chip(index)}{escape(run.name)}"


def _pill(verdict: Verdict) -> str:
    kind = "none" if verdict.violations is None else "bad" if verdict.violations else "ok"
    return f'<span class="pill {kind}">{escape(verdict.text)}</span>'


def _of(run: RunData, runs: Sequence[RunData]) -> str:
    return f" · {run.name}" if len(runs) > 1 else ""
