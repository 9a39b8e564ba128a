"""The report's page: one HTML file that needs nothing else, neither network nor script.

Everything that comes from a run is escaped before it becomes HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from staleflow.reporting import bars, figures, timeline
from staleflow.reporting.comparison import DROPPED, against, audit_text, compare
from staleflow.reporting.format import COLUMNS, accuracy_text, cells, clock, share, times, whole
from staleflow.reporting.groups import RunGroup, group_runs
from staleflow.reporting.headline import (
    ABSENT,
    TOKEN_FATES,
    Headline,
)
from staleflow.reporting.load import RunData, Verdict
from staleflow.reporting.machines import machines
from staleflow.reporting.style import CSS
from staleflow.reporting.svg import RUN_COLOURS

EVENTS_SHOWN = 200
"""A report lists this many events of a run, the last ones; metrics.jsonl has all."""


def page(runs: Sequence[RunData]) -> str:
    """Return the whole HTML document for one run or several side by side, siblings by seed together."""
    groups = group_runs(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    if 1 < len(groups) < len(runs):
        title = f"{len(groups)} settings compared, {len(runs)} runs"
    body = [
        f"<h1>{escape(title)}</h1>",
        _one(groups[0]) if len(runs) == 1 else _throughput(groups),
        _bottlenecks(groups),
        machines(groups, [_named(i, group) for i, group in enumerate(groups)]),
        _comparison(groups) if len(runs) > 1 else "",
        _learning(groups),
        _staleness(groups),
        _time(groups),
        _tokens(groups),
        _timelines(groups),
        _runs(groups) if len(groups) < len(runs) else "",
        _config(groups),
        _events(groups),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · staleflow</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{''.join(part + chr(10) for part in body if part)}</main></body></html>\n"
    )


def _one(group: RunGroup) -> str:
    run, n = group.runs[0], group.numbers[0]
    return f'<div class="sub">{_subtitle(run, n)}</div>{_stats(run, n)}'


def _bottlenecks(groups: Sequence[RunGroup]) -> str:
    several = len(groups) > 1
    lines = []
    for i, group in enumerate(groups):
        verdict, remark = group.verdict, group.remark
        name = f"{_named(i, group)}: " if several else ""
        advice = f" <span class=note>{escape(verdict.advice)}.</span>" if verdict.advice else ""
        aside = f" <span class=note>({escape(remark)})</span>" if remark else ""
        lines.append(f"<li>{name}<b>{verdict.kind}</b>: {escape(verdict.figures)}.{aside}{advice}</li>")
    card = f'<div class="card"><ul class="verdicts">{"".join(lines)}</ul></div>'
    return f"<h2>What held {'them' if several else 'it'} up</h2>{card}"


def _subtitle(run: RunData, n: Headline) -> str:
    facts = [
        "simulated" if run.simulation else "",
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
        (clock(n.seconds), "simulated time" if run.simulation else "wall time", _real_time(run)),
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


def _real_time(run: RunData) -> str:
    seconds = run.summary.get("simulation/wall_s") if run.simulation else None
    return "" if seconds is None else f"in {clock(seconds)}"


def _throughput(groups: Sequence[RunGroup]) -> str:
    legend = "".join(f"<span>{_named(i, group)}</span>" for i, group in enumerate(groups))
    card = _card("Trained tokens a second", bars.throughput(groups))
    return f'<div class="legend">{legend}</div><h2>Throughput</h2>{card}'


def _comparison(groups: Sequence[RunGroup]) -> str:
    head = "".join(f"<th>{_named(i, group)}</th>" for i, group in enumerate(groups))
    parts, section = [_audits(groups)], ""
    if relative := against(groups):
        label, ratios = relative
        cells = "".join(f"<td>{times(ratio)}</td>" for ratio in ratios)
        parts.append(f"<tr><td>throughput against {escape(label)}</td>{cells}</tr>")
    for line in compare(groups):
        if line.figure.section != section:
            section = line.figure.section
            parts.append(f'<tr class="section"><td colspan="{len(groups) + 1}">{escape(section)}</td></tr>')
        cells = "".join(
            f"<td{' class=best' if cell.best else ''}>{escape(cell.text)}"
            f"{f'<small>{escape(cell.span)}</small>' if cell.span else ''}</td>"
            for cell in line.cells
        )
        parts.append(f"<tr><td>{escape(line.figure.title)}</td>{cells}</tr>")
    table = (
        f"<table class=figures><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(parts)}</tbody></table>"
    )
    several = any(len(group.runs) > 1 for group in groups)
    note = '<p class="note">Median over the seeds; below it, least and most.</p>' if several else ""
    return f'<h2>Comparison</h2><div class="card scroll">{table}{note}</div>'


def _audits(groups: Sequence[RunGroup]) -> str:
    cells = []
    for group in groups:
        text, clean = audit_text(group)
        cells.append(f'<td><span class="pill {_pill_kind(clean)}">{escape(text)}</span></td>')
    return f"<tr><td>audit of the ledger</td>{''.join(cells)}</tr>"


def _runs(groups: Sequence[RunGroup]) -> str:
    """One line a run, where the comparison shows groups."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("run", *COLUMNS, "audit"))
    lines = []
    for i, group in enumerate(groups):
        for run, n in zip(group.runs, group.numbers, strict=True):
            values = "".join(f"<td>{escape(value)}</td>" for value in cells(n))
            name = f"{_chip(i)}{escape(run.name)}"
            lines.append(f"<tr><td>{name}</td>{values}<td>{_pill(run.verdict)}</td></tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<h2>Runs</h2><div class="card scroll">{table}</div>'


def _learning(groups: Sequence[RunGroup]) -> str:
    cards = (
        _card(
            "Sampled held-out accuracy by weight version",
            figures.accuracy(groups, over_time=False),
            "Dotted: greedy; dashed: pass@k." if len(groups) == len(groups[0].runs) == 1 else "",
        ),
        _card("Sampled held-out accuracy over wall time", figures.accuracy(groups, over_time=True)),
        _card("Reward of the trained batch", figures.reward(groups)),
        _card("Response length", figures.response_lengths(groups)),
        _card("Training signals", figures.signals(groups), wide=True),
    )
    return f'<h2>Learning</h2><div class="grid">{"".join(cards)}</div>'


def _staleness(groups: Sequence[RunGroup]) -> str:
    note = "By offset from the next step; solid: occupied, pale: reserved."
    buffers = "".join(
        _card(f"Buffers{_of(group, groups)}", timeline.buffers(group.runs[0], i), note)
        for i, group in enumerate(groups)
    )
    source = "Read off the tensors that were trained on, as the ledger has them."
    histogram = _card("Staleness of what was trained on", figures.staleness(groups), source)
    return f'<h2>Staleness</h2><div class="grid">{histogram}{buffers}</div>'


def _time(groups: Sequence[RunGroup]) -> str:
    note = "Parts run at the same time in an asynchronous run, so they may sum to more than a step."
    timing = _card("Timing of a step", bars.timings(groups), note, wide=True)
    trainer, instances = bars.trainer_time(groups), bars.instance_time(groups)
    if trainer is None and instances is None:
        head = "".join(f"<th>{name}</th>" for name in ("run", "trainer waited", "instances idle"))
        rows = "".join(
            f"<tr><td>{_named(i, group)}</td><td>{share(group.shares.trainer_waiting)}</td>"
            f"<td>{share(group.shares.idle)}</td></tr>"
            for i, group in enumerate(groups)
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        still = f'<div class="card wide"><h3>Standing still</h3>{table}</div>'
        return f'<h2>Time</h2><div class="grid">{timing}{still}</div>'
    cards = (
        _card("What the trainer's time went to", trainer, "From when all parts were up to the last step."),
        _card(
            "What the instances' time went to",
            instances,
            "Between: trajectories were there, and neither decoded nor held up by a command.",
        ),
    )
    return f'<h2>Time</h2><div class="grid">{"".join(cards)}{timing}</div>'


def _tokens(groups: Sequence[RunGroup]) -> str:
    names = ("", "generated", *(fate.replace("_", " ") for fate in TOKEN_FATES), "check")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for i, group in enumerate(groups):
        name, balances = f"<td>{_named(i, group)}</td>", [n.tokens for n in group.numbers if n.tokens]
        if not balances:
            lines.append(f'<tr>{name}<td colspan="{len(TOKEN_FATES) + 2}">not measured</td></tr>')
            continue
        generated = sum(balance.generated for balance in balances)
        fates = "".join(_token_cell(sum(b.fates[fate] for b in balances), generated) for fate in TOKEN_FATES)
        missing = max((balance.missing for balance in balances), key=abs)
        check = '<span class="ok-text">✓ balanced</span>'
        if missing:
            what = "missing" if missing > 0 else "too many"
            check = f'<span class="bad-text">✗ {abs(missing):,} {what}</span>'
        lines.append(f"<tr>{name}<td>{generated:,}</td>{fates}<td>{check}</td></tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    note = "Generated = trained + filtered + aborted + discarded + in flight."
    if any(len(group.runs) > 1 for group in groups):
        note += " Sums over the seeds; the check is of each run."
    lengths = figures.sampled_and_trained(groups)
    chart = bars.token_fates(groups, half=lengths is not None)
    cards = _card("Where the tokens went", chart, wide=lengths is None)
    if lengths is not None:
        bias = "Where the lines part, what was dropped or cut off was not like the rest."
        cards += _card("Response length, sampled and trained", lengths, bias)
    table_card = f'<div class="card wide scroll">{table}<p class="note">{note}</p></div>'
    return f'<h2>Tokens</h2><div class="grid">{cards}{table_card}{_dropped(groups)}</div>'


def _dropped(groups: Sequence[RunGroup]) -> str:
    """Groups dropped, members aborted and stragglers cut in one run; of several, the comparison has them."""
    lines = [line for line in compare(groups) if line.figure.section == DROPPED]
    if not lines or len(groups) > 1 or len(groups[0].runs) > 1:
        return ""
    rows = "".join(
        f"<tr><td>{escape(line.figure.title)}</td><td>{escape(line.cells[0].text)}</td></tr>"
        for line in lines
    )
    return f'<div class="card wide"><h3>{DROPPED}</h3><table>{rows}</table></div>'


def _token_cell(tokens: int, generated: int) -> str:
    part = f"<small>{tokens / generated:.1%}</small>" if generated else ""
    return f"<td>{tokens:,}{part}</td>"


def _timelines(groups: Sequence[RunGroup]) -> str:
    note = (
        "Filled: trajectories running; a line across: a pull. "
        "Below: versions of the instances (grey) and of the trainer."
    )
    cards = "".join(
        _card(
            f"Instances over time{_of(group, groups)}",
            timeline.instances(group.runs[0], i),
            note
            if len(group.runs) == 1
            else f"{note} Of {escape(group.runs[0].name)}, the first of its seeds.",
            wide=True,
        )
        for i, group in enumerate(groups)
    )
    return f'<h2>Instances</h2><div class="grid">{cards}</div>'


def _config(groups: Sequence[RunGroup]) -> str:
    parts = []
    runs = [(i, run) for i, group in enumerate(groups) for run in group.runs]
    if len(runs) > 1:
        head = "".join(f"<th>{_named(i, group)}</th>" for i, group in enumerate(groups))
        lines = "".join(
            f"<tr><td><code>{escape(key)}</code></td>"
            f"{''.join(f'<td>{escape(group.keys[key])}</td>' for group in groups)}</tr>"
            for key in groups[0].keys
        )
        table = f"<table><thead><tr><th>key</th>{head}</tr></thead><tbody>{lines}</tbody></table>"
        body = table if groups[0].keys else '<div class="empty">the configs are the same</div>'
        parts.append(f'<div class="card scroll"><h3>Differences, seeds aside</h3>{body}</div>')
    for i, run in runs:
        text = escape(run.config_text) or "no config.yaml"
        parts.append(
            f"<details><summary>Config · {_chip(i)}{escape(run.name)}</summary><pre>{text}</pre></details>"
        )
    return f"<h2>Config</h2>{''.join(parts)}"


def _events(groups: Sequence[RunGroup]) -> str:
    parts = []
    for i, run in ((i, run) for i, group in enumerate(groups) for run in group.runs):
        if not run.events:
            continue
        lines = "".join(
            f"<tr><td>{escape(clock(event.get('run/seconds')))}</td>"
            f'<td class="text">{escape(str(event.get("event/name", "")))}</td>'
            f'<td class="text">{escape(str(event.get("event/text", "")))}</td></tr>'
            for event in run.events[-EVENTS_SHOWN:]
        )
        title = f"{len(run.events)} event{'' if len(run.events) == 1 else 's'} · {_chip(i)}{escape(run.name)}"
        parts.append(f"<details><summary>{title}</summary><table>{lines}</table></details>")
    return f"<h2>Events</h2>{''.join(parts)}" if parts else ""


def _card(title: str, svg: str | None, note: str = "", *, wide: bool = False) -> str:
    body = svg or '<div class="empty">not measured in this run</div>'
    foot = f'<p class="note">{note}</p>' if note and svg else ""
    return f'<div class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{body}{foot}</div>'


def _chip(index: int) -> str:
    return f'<span class="chip" style="background:var(--run{index % RUN_COLOURS})"></span>'


def _named(index: int, group: RunGroup) -> str:
    return f"{_chip(index)}{escape(group.label)}"


def _pill(verdict: Verdict) -> str:
    clean = None if verdict.violations is None else verdict.violations == 0
    return f'<span class="pill {_pill_kind(clean)}">{escape(verdict.text)}</span>'


def _pill_kind(clean: bool | None) -> str:
    return {None: "none", True: "ok", False: "bad"}[clean]


def _of(group: RunGroup, groups: Sequence[RunGroup]) -> str:
    return f" · {group.label}" if len(groups) > 1 else ""
