"""The table that compares groups of runs: one line a figure, one column a group.

The page, the terminal and `--json` show these figures, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.format import clock, share, whole
from staleflow.reporting.groups import RunGroup, Spread, spread
from staleflow.reporting.headline import ABSENT, TOKEN_FATES, Headline
from staleflow.reporting.load import RunData, bound_rates

Measure = Callable[[RunData, Headline], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    """Of `--json`; snake case, with its unit where it has one."""
    section: str
    title: str
    measure: Measure
    text: Callable[[float], str]
    more_is_better: bool = False
    brief: bool = False
    """Also in the terminal's table."""


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _three(value: float) -> str:
    return f"{value:.3f}"


def _fine(value: float) -> str:
    """A share that may be small."""
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def _share_of(name: str) -> Measure:
    return lambda run, n: getattr(n.shares, name)


def _counted(name: str) -> Measure:
    return lambda run, n: n.counts.get(name)


def _fate(name: str) -> Measure:
    return lambda run, n: (
        n.tokens.fates[name] / n.tokens.generated if n.tokens and n.tokens.generated else None
    )


def _cause(name: str) -> Measure:
    return lambda run, n: n.shares.waiting_for.get(name)


def _length(which: int) -> Measure:
    return lambda run, n: n.lengths[which]


def _achieved(run: RunData, n: Headline) -> float | None:
    """Of the least bound that the machines of a simulated run set."""
    bounds = bound_rates(run)
    return n.tokens_per_s / min(bounds.values()) if bounds and n.tokens_per_s else None


TOKENS = "Generated tokens"
"""The section whose titles are fates of tokens."""
DROPPED = "Dropped and cut"
"""The section of which only such lines are shown as have anything to tell."""
_Row = tuple[str, str, Measure, Callable[[float], str]]
_SECTIONS: tuple[tuple[str, tuple[_Row, ...]], ...] = (
    ("Throughput", (
        ("trained_tokens_per_s", "trained tokens/s", lambda run, n: n.tokens_per_s, whole),
        ("generated_tokens_per_s", "generated tokens/s", lambda run, n: n.generated_per_s, whole),
        ("steps_per_s", "steps/s", lambda run, n: n.steps_per_s, _three),
        ("steps", "steps", lambda run, n: n.steps, _count),
        ("wall_s", "wall time", lambda run, n: n.seconds, clock),
        ("bound_share", "of what the machines allow", _achieved, share),
    )),
    ("Staleness", (
        ("staleness_mean", "staleness mean", lambda run, n: n.staleness_mean, _two),
        ("staleness_max", "staleness max", lambda run, n: n.staleness_max, _count),
        ("staleness_bound", "bound η", lambda run, n: n.bound, _count),
    )),
    ("Trainer", (
        ("trainer_waiting_share", "trainer waited", _share_of("trainer_waiting"), share),
        ("waiting_rollout_share", "… for instances at work", _cause("rollout"), share),
        ("waiting_longest_share", "… for the longest responses", _cause("longest"), share),
        ("waiting_reward_share", "… for rewards", _cause("reward"), share),
        ("waiting_pull_share", "… for pulls", _cause("pull"), share),
        ("waiting_routing_share", "… with nothing running", _cause("routing"), share),
        ("waiting_environment_share", "… for answers from outside", _cause("environment"), share),
        ("update_share", "update", _share_of("updating"), share),
        ("push_share", "push", _share_of("pushing"), _fine),
    )),
    ("Instances", (
        ("instances_idle_share", "instances idle", _share_of("idle"), share),
        ("idle_while_training_share", "… while the trainer worked", _share_of("idle_while_training"), share),
        ("decoding_share", "decoding", _share_of("decoding"), share),
        ("pulling_share", "pulling", _share_of("pulling"), _fine),
        ("other_commands_share", "other commands", _share_of("commands"), _fine),
    )),
    ("Coordination", (
        ("coordination_share", "coordination", _share_of("coordination"), _fine),
        ("pulls", "pulls", _counted("pulls"), _count),
        ("interrupts", "interrupts", _counted("interrupts"), _count),
        ("migrations", "migrations", _counted("migrations"), _count),
        ("preemptions", "preemptions", _counted("preemptions"), _count),
    )),
    (TOKENS, tuple(
        (f"tokens_{fate}_share", fate.replace("_", " "), _fate(fate), _fine) for fate in TOKEN_FATES
    )),
    (DROPPED, (
        ("groups_filtered", "groups filtered", _counted("groups_filtered"), _count),
        ("groups_failed", "groups failed", _counted("groups_failed"), _count),
        ("groups_expired", "spare groups expired", _counted("groups_expired"), _count),
        ("members_aborted", "surplus members aborted", _counted("members_aborted"), _count),
        ("stragglers_retried", "stragglers sampled anew", _counted("stragglers_retried"), _count),
        ("stragglers_cut", "stragglers cut", _counted("stragglers_cut"), _count),
    )),
    ("Response length", (
        ("sampled_length_mean", "sampled, mean", _length(0), whole),
        ("trained_length_mean", "trained, mean", _length(1), whole),
    )),
    ("Learning", (
        ("first_accuracy", "accuracy, first", lambda run, n: n.first_accuracy, _three),
        ("final_accuracy", "accuracy, last", lambda run, n: n.last_accuracy, _three),
    )),
)  # fmt: skip
_MORE_IS_BETTER = ("trained_tokens_per_s", "final_accuracy")
_DETAILS = ("waiting_", "update_", "push_", "idle_while", "decoding_", "pulling_", "other_")
"""Beginnings of the names of figures that the terminal leaves to the page."""
FIGURES = tuple(
    Figure(
        section=section,
        name=name,
        title=title,
        measure=measure,
        text=text,
        more_is_better=name in _MORE_IS_BETTER,
        brief=not name.startswith(_DETAILS),
    )
    for section, rows in _SECTIONS
    for name, title, measure, text in rows
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of one group."""

    text: str
    """The median, or the one value there is."""
    span: str
    """`1,180..1,290`; empty for a single run, and where all runs agree."""
    best: bool
    spread: Spread | None
    values: tuple[float | None, ...]
    """One a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of all groups."""

    figure: Figure
    cells: tuple[Cell, ...]


def compare(groups: Sequence[RunGroup]) -> list[Line]:
    """Return the lines of figures that any run measured; of what was dropped, those that are not all 0."""
    lines = []
    for figure in FIGURES:
        values = [
            tuple(figure.measure(run, n) for run, n in zip(group.runs, group.numbers, strict=True))
            for group in groups
        ]
        spreads = [spread(of_group) for of_group in values]
        if not any(spreads) or (figure.section == DROPPED and not any(s.most for s in spreads if s)):
            continue
        best = _best(spreads) if figure.more_is_better else None
        lines.append(
            Line(
                figure=figure,
                cells=tuple(
                    _cell(figure, of_group, found, place == best)
                    for place, (of_group, found) in enumerate(zip(values, spreads, strict=True))
                ),
            )
        )
    return lines


def against(groups: Sequence[RunGroup]) -> tuple[str, list[float | None]] | None:
    """Trained tokens/s of each group as a multiple of the reference's, which is policy sync or the first."""
    rates = [spread([n.tokens_per_s for n in group.numbers]) for group in groups]
    place = next((i for i, group in enumerate(groups) if group.numbers[0].policy == "sync"), 0)
    reference = rates[place] if len(groups) > 1 else None
    if reference is None or not reference.median:
        return None
    return groups[place].label, [rate.median / reference.median if rate else None for rate in rates]


def audit_text(group: RunGroup) -> tuple[str, bool | None]:
    """Return the audits of a group in words, and whether they are clean; None where one was impossible."""
    found = [run.verdict.violations for run in group.runs]
    if len(found) == 1:
        return group.runs[0].verdict.text, None if found[0] is None else found[0] == 0
    clean = sum(violations == 0 for violations in found)
    unclear = all(violations == 0 or violations is None for violations in found)
    return f"{clean} of {len(found)} clean", True if clean == len(found) else None if unclear else False


def as_json(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return the comparison as plain values: the same figures, with each run's own."""
    lines, relative = compare(groups), against(groups)
    return {
        "throughput_against": relative[0] if relative else None,
        "groups": [
            {
                "label": group.label,
                "keys": dict(group.keys),
                "runs": [
                    {
                        "name": run.name,
                        "folder": str(run.folder),
                        "seed": _seed(run),
                        "reason": n.reason,
                        "violations": run.verdict.violations,
                        "tokens_missing": n.tokens.missing if n.tokens else None,
                    }
                    for run, n in zip(group.runs, group.numbers, strict=True)
                ],
                "throughput_ratio": relative[1][place] if relative else None,
                "figures": {line.figure.name: _plain(line.cells[place]) for line in lines},
                "bottleneck": {
                    "kind": group.verdict.kind,
                    "figures": group.verdict.figures,
                    "advice": group.verdict.advice,
                    "split": group.verdict.split,
                    "split_now": group.verdict.split_now,
                    "remark": group.remark,
                },
            }
            for place, group in enumerate(groups)
        ],
    }


def _plain(cell: Cell) -> dict[str, Any] | None:
    if cell.spread is None:
        return None
    return {
        "median": cell.spread.median,
        "min": cell.spread.least,
        "max": cell.spread.most,
        "runs": list(cell.values),
    }


def _seed(run: RunData) -> Any:
    section = run.config.get("run")
    return section.get("seed") if isinstance(section, dict) else None


def _cell(figure: Figure, values: tuple[float | None, ...], found: Spread | None, best: bool) -> Cell:
    if found is None:
        return Cell(text=ABSENT, span="", best=False, spread=None, values=values)
    ends = figure.text(found.least), figure.text(found.most)
    return Cell(
        text=figure.text(found.median),
        span=f"{ends[0]}..{ends[1]}" if ends[0] != ends[1] else "",
        best=best,
        spread=found,
        values=values,
    )


def _best(spreads: Sequence[Spread | None]) -> int | None:
    """The place of the largest median; None where there is no other, or two share it."""
    known = sorted((s.median for s in spreads if s is not None), reverse=True)
    if len(known) < 2 or known[0] == known[1]:
        return None
    return next(i for i, s in enumerate(spreads) if s is not None and s.median == known[0])
