"""Runs that differ only in their seed, as one group of a comparison.

A group holds each seed once: a run given twice, or a repetition with the same seed, is a group of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from staleflow.reporting.bottleneck import Bottleneck, Resources, bottleneck, resources
from staleflow.reporting.format import ABSENT
from staleflow.reporting.headline import TOKEN_FATES, Headline, TokenFates, flat_config, headline
from staleflow.reporting.load import RunData
from staleflow.reporting.spread import spread
from staleflow.reporting.utilization import TimeShares

SEED = "run.seed"
SIMULATED = "simulated"
"""A key beside those of the config: a real and a simulated run are never in one group."""
_NAMES = ("run.name", "run.output_dir")
_WATCHING = "telemetry."
"""Keys under it do not change the run."""
_PREFIXES = {"staleness.bound": "η=", "coordination.policy": ""}
"""How a label begins for these keys; for others, with the last part of the key and `=`."""
FEW_STEPS = 10
"""In a shorter run, filling the first batch and training the last ones distort the shares of time."""
_KEYS_IN_A_LABEL = 3
"""If groups differ in more keys, the label is a run's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs of one config under several seeds, or a single run."""

    label: str
    """How it differs from other groups: `sync, η=1`; the run's name if every group has one run."""
    runs: tuple[RunData, ...]
    numbers: tuple[Headline, ...]
    """One per run, in the same order."""
    keys: Mapping[str, str]
    """Config keys in which the groups differ, and its values."""

    @property
    def resources(self) -> Resources:
        """What each side of its runs had."""
        return resources(self.runs[0])

    @property
    def shares(self) -> TimeShares:
        """Medians over its runs."""
        return _median_shares([n.shares for n in self.numbers])

    @property
    def tokens(self) -> TokenFates | None:
        """Sums over those of its runs that counted tokens."""
        counted = [n.tokens for n in self.numbers if n.tokens]
        if not counted:
            return None
        fates = {fate: sum(tokens.fates[fate] for tokens in counted) for fate in TOKEN_FATES}
        return TokenFates(generated=sum(tokens.generated for tokens in counted), fates=fates)

    @property
    def tokens_missing(self) -> int:
        """The largest imbalance of one of its runs."""
        return max((n.tokens.missing for n in self.numbers if n.tokens), key=abs, default=0)

    @property
    def verdict(self) -> Bottleneck:
        """The bottleneck, from the medians."""
        return bottleneck(self.shares, self.resources)

    @property
    def dissent(self) -> str:
        """The verdicts by seed, as text; empty if all are the group's."""
        kinds = [
            bottleneck(n.shares, resources(run)).kind for run, n in zip(self.runs, self.numbers, strict=True)
        ]
        if set(kinds) == {self.verdict.kind}:
            return ""
        return "by seed: " + ", ".join(
            f"{kind} {kinds.count(kind)} of {len(kinds)}" for kind in dict.fromkeys(kinds)
        )

    @property
    def remark(self) -> str:
        """What limits the verdict; empty if nothing does."""
        steps = min(n.steps for n in self.numbers)
        short = f"only {steps} step{'' if steps == 1 else 's'}: start-up and end distort the shares"
        virtual = "times of an inline run's virtual clock, not of this machine"
        simulated = "simulated" if any(run.simulation for run in self.runs) else ""
        few = short if steps < FEW_STEPS else ""
        texts = (self.dissent, simulated, few, virtual if self.resources.virtual else "")
        return "; ".join(text for text in texts if text)


def group_runs(runs: Sequence[RunData]) -> list[RunGroup]:
    """Put runs together that differ only in the seed, in the order of their first runs."""
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


def _median_shares(all_shares: Sequence[TimeShares]) -> TimeShares:
    def middle(name: str) -> float | None:
        found = spread([getattr(s, name) for s in all_shares])
        return found.median if found else None

    causes = dict.fromkeys(cause for s in all_shares for cause in s.waiting_for)
    return TimeShares(
        waiting_for={c: median([s.waiting_for.get(c, 0.0) for s in all_shares]) for c in causes},
        **{name: middle(name) for name in TimeShares.__slots__ if name != "waiting_for"},
    )
