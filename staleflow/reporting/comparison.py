"""The table that compares groups of runs: one row per measure, one column per group.

The page, the terminal and `--json` show these measures, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.format import ABSENT, clock, count, fine_share, share, whole
from staleflow.reporting.groups import RunGroup
from staleflow.reporting.headline import TOKEN_FATES, Headline
from staleflow.reporting.load import RunData, bound_rates, setting
from staleflow.reporting.spread import Spread, spread
from staleflow.telemetry.catalogue import CATALOGUE

Measurement = Callable[[RunData, Headline], float | None]
_Row = tuple[str, str, Measurement, Callable[[float], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What a row of the table shows."""

    name: str
    """Its key in `--json`: snake case, with the unit if there is one."""
    section: str
    title: str
    value: Measurement
    text: Callable[[float], str]
    more_is_better: bool = False
    brief: bool = False
    """Shown in the terminal's table, too."""


def _two(value: float) -> str:
    return f"{value:.2f}"


def _three(value: float) -> str:
    return f"{value:.3f}"


def _share_of(name: str) -> Measurement:
    return lambda run, n: getattr(n.shares, name)


def _counted(name: str) -> Measurement:
    return lambda run, n: n.counts.get(name)


def _counts(*, of_coordination: bool) -> list[_Row]:
    """What the catalogue gives a figure: what coordinator and instances did, or what was dropped."""
    counted = [metric for metric in CATALOGUE.values() if metric.figure]
    return [
        (metric.figure, metric.title, _counted(metric.figure), count)
        for metric in sorted(counted, key=lambda metric: metric.section != "coord")
        if (metric.unit in ("commands", "preemptions")) == of_coordination
    ]


def _fate(name: str) -> Measurement:
    return lambda run, n: (
        n.tokens.fates[name] / n.tokens.generated if n.tokens and n.tokens.generated else None
    )


def _cause(name: str) -> Measurement:
    return lambda run, n: n.shares.waiting_for.get(name)


def _length(which: int) -> Measurement:
    return lambda run, n: n.lengths[which]


def _achieved(run: RunData, n: Headline) -> float | None:
    """The share reached of the lowest bound that the simulated machines set."""
    bounds = bound_rates(run)
    return n.tokens_per_s / min(bounds.values()) if bounds and n.tokens_per_s else None


TOKENS = "Generated tokens"
"""The section whose titles are token fates."""
DROPPED = "Dropped and truncated"
"""The section that shows only rows which are not all 0."""
_SECTIONS: tuple[tuple[str, tuple[_Row, ...]], ...] = (
    ("Throughput", (
        ("trained_tokens_per_s", "trained tokens/s", lambda run, n: n.tokens_per_s, whole),
        ("generated_tokens_per_s", "generated tokens/s", lambda run, n: n.generated_per_s, whole),
        ("steps_per_s", "steps/s", lambda run, n: n.steps_per_s, _three),
        ("steps", "steps", lambda run, n: n.steps, count),
        ("wall_s", "wall time", lambda run, n: n.seconds, clock),
        ("bound_share", "of the machines' limit", _achieved, share),
    )),
    ("Staleness", (
        ("staleness_mean", "staleness mean", lambda run, n: n.staleness_mean, _two),
        ("staleness_max", "staleness max", lambda run, n: n.staleness_max, count),
        ("staleness_bound", "bound η", lambda run, n: n.bound, count),
    )),
    ("Trainer", (
        ("trainer_waiting_share", "trainer waited", _share_of("trainer_waiting"), share),
        ("waiting_rollout_share", "… for busy instances", _cause("rollout"), share),
        ("waiting_longest_share", "… for the longest responses", _cause("longest"), share),
        ("waiting_reward_share", "… for rewards", _cause("reward"), share),
        ("waiting_pull_share", "… for pulls", _cause("pull"), share),
        ("waiting_routing_share", "… with nothing running", _cause("routing"), share),
        ("waiting_environment_share", "… for environments", _cause("environment"), share),
        ("update_share", "update", _share_of("updating"), share),
        ("push_share", "push", _share_of("pushing"), fine_share),
    )),
    ("Instances", (
        ("instances_idle_share", "instances idle", _share_of("idle"), share),
        ("idle_while_training_share", "… while the trainer worked", _share_of("idle_while_training"), share),
        ("decoding_share", "decoding", _share_of("decoding"), share),
        ("pulling_share", "pulling", _share_of("pulling"), fine_share),
        ("other_commands_share", "other commands", _share_of("commands"), fine_share),
    )),
    ("Coordination", (
        ("coordination_share", "coordination", _share_of("coordination"), fine_share),
        *_counts(of_coordination=True),
    )),
    (TOKENS, tuple(
        (f"tokens_{fate}_share", fate.replace("_", " "), _fate(fate), fine_share) for fate in TOKEN_FATES
    )),
    (DROPPED, (
        *_counts(of_coordination=False),
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
KEY_MEASURES = (
    "trained_tokens_per_s", "steps", "wall_s", "staleness_mean", "staleness_max", "staleness_bound",
    "trainer_waiting_share", "instances_idle_share", "final_accuracy",
)  # fmt: skip
"""The columns of a table whose rows are groups or runs."""
_DETAILS = ("waiting_", "update_", "push_", "idle_while", "decoding_", "pulling_", "other_")
"""Measures whose names begin so are on the page, not on the terminal."""
MEASURES = tuple(
    Measure(
        section=section,
        name=name,
        title=title,
        value=value,
        text=text,
        more_is_better=name in _MORE_IS_BETTER,
        brief=not name.startswith(_DETAILS),
    )
    for section, rows in _SECTIONS
    for name, title, value, text in rows
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCell:
    """One measure of one group."""

    text: str
    """The median, or the only value."""
    span: str
    """`1,180..1,290`; empty for a single run, or where all runs agree."""
    best: bool
    spread: Spread | None
    values: tuple[float | None, ...]
    """One per run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One measure of all groups."""

    measure: Measure
    cells: tuple[ComparedCell, ...]

    def text(self, place: int, run: int) -> str:
        """The value of one run of the group at this place."""
        value = self.cells[place].values[run]
        return ABSENT if value is None else self.measure.text(value)


def compare(groups: Sequence[RunGroup]) -> list[ComparedRow]:
    """Return the rows that any run measured; in section DROPPED, those that are not all 0."""
    compared = []
    for measure in MEASURES:
        values = [
            tuple(measure.value(run, n) for run, n in zip(group.runs, group.numbers, strict=True))
            for group in groups
        ]
        spreads = [spread(of_group) for of_group in values]
        if not any(spreads) or (measure.section == DROPPED and not any(s.most for s in spreads if s)):
            continue
        best = _best(spreads) if measure.more_is_better else None
        compared.append(
            ComparedRow(
                measure=measure,
                cells=tuple(
                    _cell(measure, of_group, found, place == best)
                    for place, (of_group, found) in enumerate(zip(values, spreads, strict=True))
                ),
            )
        )
    return compared


def against(groups: Sequence[RunGroup]) -> tuple[str, list[float | None]] | None:
    """Return a reference, policy sync or else the first group, and the throughput of each against it."""
    rates = [spread([n.tokens_per_s for n in group.numbers]) for group in groups]
    place = next((i for i, group in enumerate(groups) if group.numbers[0].policy == "sync"), 0)
    reference = rates[place] if len(groups) > 1 else None
    if reference is None or not reference.median:
        return None
    return groups[place].label, [rate.median / reference.median if rate else None for rate in rates]


def audit_text(group: RunGroup) -> tuple[str, bool | None]:
    """Return the audits of a group in words, and whether they are clean; None if one was not possible."""
    audits = [run.audit for run in group.runs]
    if len(audits) == 1:
        return audits[0].text, audits[0].clean
    clean = sum(audit.clean is True for audit in audits)
    dirty = any(audit.clean is False for audit in audits)
    return f"{clean} of {len(audits)} clean", True if clean == len(audits) else False if dirty else None


def as_json(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return the comparison as plain values, with those of each run."""
    rows, relative = compare(groups), against(groups)
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
                        "seed": setting(run.config, "run", "seed"),
                        "reason": n.reason,
                        "violations": run.audit.violations,
                        "tokens_missing": n.tokens.missing if n.tokens else None,
                    }
                    for run, n in zip(group.runs, group.numbers, strict=True)
                ],
                "throughput_ratio": relative[1][place] if relative else None,
                "figures": {row.measure.name: _plain(row.cells[place]) for row in rows},
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


def _plain(cell: ComparedCell) -> dict[str, Any] | None:
    if cell.spread is None:
        return None
    return {
        "median": cell.spread.median,
        "min": cell.spread.least,
        "max": cell.spread.most,
        "runs": list(cell.values),
    }


def _cell(
    measure: Measure, values: tuple[float | None, ...], found: Spread | None, best: bool
) -> ComparedCell:
    if found is None:
        return ComparedCell(text=ABSENT, span="", best=False, spread=None, values=values)
    ends = measure.text(found.least), measure.text(found.most)
    return ComparedCell(
        text=measure.text(found.median),
        span=f"{ends[0]}..{ends[1]}" if ends[0] != ends[1] else "",
        best=best,
        spread=found,
        values=values,
    )


def _best(spreads: Sequence[Spread | None]) -> int | None:
    """The place of the largest median; None if it is the only one, or two groups share it."""
    known = sorted((s.median for s in spreads if s is not None), reverse=True)
    if len(known) < 2 or known[0] == known[1]:
        return None
    return next(i for i, s in enumerate(spreads) if s is not None and s.median == known[0])
