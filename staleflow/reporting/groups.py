"""Runs that differ only in their seed, as one row of a comparison.

A group holds each seed once: the same run given twice, or an unseeded repetition, stays a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from staleflow.reporting.bottleneck import Bottleneck, Setup, bottleneck, setup
from staleflow.reporting.headline import ABSENT, Headline, flat_config, headline
from staleflow.reporting.load import RunData
from staleflow.reporting.utilization import Shares

SEED = "run.seed"
SIMULATED = "simulated"
"""Beside the keys of the config: a real run and a simulated one are no siblings."""
_NAMES = ("run.name", "run.output_dir")
_WATCHING = "telemetry."
"""Keys under it change what is seen of a run, not the run."""
_PREFIXES = {"staleness.bound": "η=", "coordination.policy": ""}
"""Keys that a label writes in their own way; others are the last part of the key and `=`."""
FEW_STEPS = 10
"""In a shorter run the first batch, generated alone, and the last ones, trained alone, weigh in."""
_KEYS_IN_A_LABEL = 3
"""Where groups differ in more keys than these, a run's name says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over the runs of a group."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs of one config under several seeds, or a single run."""

    label: str
    """What tells it from the other groups: `sync, η=1`; the run's name where no run has a sibling."""
    runs: tuple[RunData, ...]
    numbers: tuple[Headline, ...]
    """One a run, in the same order."""
    keys: Mapping[str, str]
    """Config keys in which the groups differ, and this one's values."""

    @property
    def setup(self) -> Setup:
        """What its runs gave to each side."""
        return setup(self.runs[0])

    @property
    def shares(self) -> Shares:
        """Medians over its runs."""
        return _median_shares([n.shares for n in self.numbers])

    @property
    def verdict(self) -> Bottleneck:
        """The bottleneck, from the medians."""
        return bottleneck(self.shares, self.setup)

    @property
    def dissent(self) -> str:
        """Verdicts of runs that differ from the group's, as text; empty where all agree."""
        kinds = [
            bottleneck(n.shares, setup(run)).kind for run, n in zip(self.runs, self.numbers, strict=True)
        ]
        if set(kinds) == {self.verdict.kind}:
            return ""
        return "by seed: " + ", ".join(
            f"{kind} {kinds.count(kind)} of {len(kinds)}" for kind in dict.fromkeys(kinds)
        )

    @property
    def remark(self) -> str:
        """What to bear in mind with the verdict; empty where there is nothing."""
        steps = min(n.steps for n in self.numbers)
        short = f"only {steps} step{'' if steps == 1 else 's'}: filling and draining weigh in"
        virtual = "on the virtual clock of an inline run, so no measure of this machine"
        simulated = "simulated" if any(run.simulation for run in self.runs) else ""
        few = short if steps < FEW_STEPS else ""
        texts = (self.dissent, simulated, few, virtual if self.setup.virtual else "")
        return "; ".join(text for text in texts if text)


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Put runs together that differ only in the seed, in the order of their first ones."""
    found: list[tuple[dict[str, str], list[RunData], set[str]]] = []
    for run in runs:
        config = flat_config(run.config)
        seed = config.pop(SEED, "")
        own = {k: v for k, v in config.items() if k not in _NAMES and not k.startswith(_WATCHING)}
        if run.simulation:
            own[SIMULATED] = "yes"
        for other, members, seeds in found:
            if own and own == other and seed not in seeds:
                members.append(run)
                seeds.add(seed)
                break
        else:
            found.append((own, [run], {seed}))
    configs = [own for own, _, _ in found]
    differing = [k for k in _in_order(configs) if len({own.get(k) for own in configs}) > 1]
    seeded = any(len(members) > 1 for _, members, _ in found)
    return [
        RunGroup(
            label=_label(members[0], own, differing, seeded),
            runs=tuple(members),
            numbers=tuple(headline(run) for run in members),
            keys={key: own.get(key, ABSENT) for key in differing},
        )
        for own, members, _ in found
    ]


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return median, least and most of what was measured; None where nothing was."""
    known = [value for value in values if value is not None]
    return Spread(median=median(known), least=min(known), most=max(known)) if known else None


def _label(run: RunData, config: Mapping[str, str], differing: Sequence[str], seeded: bool) -> str:
    if not seeded:
        return run.name
    if 0 < len(differing) <= _KEYS_IN_A_LABEL:
        return ", ".join(
            _PREFIXES.get(k, f"{k.rpartition('.')[2]}=") + config.get(k, ABSENT) for k in differing
        )
    return re.sub(r",?seed=[^,/]*$", "", run.name).rstrip("/") or run.name


def _in_order(configs: Sequence[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(key for config in configs for key in config))


def _median_shares(all_shares: Sequence[Shares]) -> Shares:
    def middle(name: str) -> float | None:
        found = spread([getattr(s, name) for s in all_shares])
        return found.median if found else None

    causes = dict.fromkeys(cause for s in all_shares for cause in s.waiting_for)
    return Shares(
        waiting_for={c: median([s.waiting_for.get(c, 0.0) for s in all_shares]) for c in causes},
        **{name: middle(name) for name in Shares.__slots__ if name != "waiting_for"},
    )
