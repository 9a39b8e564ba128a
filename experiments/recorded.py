"""What a finished run's journal and ledger say of its work and its latencies, to simulate the same work.

Invariants: groups are in the order in which they were drawn, which is the order in which a simulated run
draws its own, whatever the prompts are called; latencies are those that the run loop saw, so that what
happens between the processes is in them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from staleflow.errors import UserError
from staleflow.reporting.load import load_run
from staleflow.simulation.settings import TrainerCosts
from staleflow.storage.journal import read_journal

_PROMPT = re.compile(r"e\d+-p(\d+)")
_MEMBER = re.compile(r"-m(\d+)$")
FASTEST = 0.05
"""Share of acknowledgements taken to have come as fast as they can: right before a decode step's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One training step as the run loop saw it."""

    tokens: int
    """Of prompts and responses."""
    seconds: float
    """From the batch to the pushed weights, without waiting for the push before it."""
    push_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Of one attempt."""

    lengths: tuple[tuple[int | None, ...], ...]
    """Response tokens by group and member; None: it did not finish."""
    rewards: tuple[tuple[float | None, ...], ...]
    prompt_length: float
    """Tokens, on average."""
    steps: tuple[RecordedStep, ...]
    round_trips: tuple[float, ...]
    """Seconds from each command to its acknowledgement."""
    scoring: tuple[float, ...]
    """Seconds from the end of each trajectory to its reward."""
    pulls: tuple[float, ...]
    """Seconds that instances stood still, for each pull."""

    @property
    def unfinished(self) -> int:
        """Trajectories without a length."""
        return sum(tokens is None for group in self.lengths for tokens in group)

    @property
    def mean_length(self) -> float:
        """Of those that finished."""
        return fmean(tokens for group in self.lengths for tokens in group if tokens is not None)

    @property
    def reward_s(self) -> float:
        """Median seconds to a reward."""
        return median(self.scoring) if self.scoring else 0.0

    @property
    def pull_s(self) -> float:
        """Mean seconds of a pull."""
        return fmean(self.pulls) if self.pulls else 0.0

    def one_way_s(self, step_s: float) -> float:
        """Seconds from the coordinator to an instance, or back.

        A command that comes right before a decode step's end is acknowledged after the next one, of `step_s`.
        """
        if not self.round_trips:
            return 0.0
        fastest = sorted(self.round_trips)[int(FASTEST * len(self.round_trips))]
        return max(0.0, fastest - step_s) / 2

    def trainer(self) -> TrainerCosts:
        """Least squares over the steps: a fixed part, a part per token, neither below 0, and the push."""
        push_s = fmean(step.push_s for step in self.steps)
        fixed_s, token_s = fit_line(
            [step.tokens for step in self.steps], [step.seconds - step.push_s for step in self.steps]
        )
        return TrainerCosts(fixed_s=fixed_s, token_s=token_s, push_s=push_s)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return a and b, both at least 0, of the line y = a + b x that fits best."""
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    if slope <= 0:
        return max(0.0, y_mean), 0.0
    if y_mean - slope * x_mean >= 0:
        return y_mean - slope * x_mean, slope
    return 0.0, max(0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs))


class Replay:
    """The recorded work as a simulated cluster asks for it: group k of its own is the k-th drawn one.

    What did not finish, or was never drawn, takes the mean length, or the work from its beginning again.
    """

    def __init__(self, recorded: Recorded) -> None:
        mean = round(recorded.mean_length)
        self._lengths = [[mean if t is None else t for t in group] for group in recorded.lengths]
        self._rewards = [[0.0 if r is None else r for r in group] for group in recorded.rewards]

    def lengths(self, prompt: str, members: Sequence[str]) -> list[int]:
        """A `simulation.lengths.Lengths`."""
        group = self._lengths[_number(_PROMPT, prompt) % len(self._lengths)]
        return [group[_number(_MEMBER, member) % len(group)] for member in members]

    def reward(self, trajectory_id: str) -> float:
        """Raw reward by trajectory id."""
        group = self._rewards[_number(_PROMPT, trajectory_id) % len(self._rewards)]
        return group[_number(_MEMBER, trajectory_id) % len(group)]


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    assert found is not None, text
    return int(found.group(1))


def read_recorded(folder: Path) -> Recorded:
    """Read a run of one attempt. Raises UserError where it has no journal, or trained nothing."""
    path = folder / "journal.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} has no journal.jsonl: record the run with telemetry.journal: true")
    reader = _Reader()
    for line in read_journal(path):
        reader.take(line)
    ledger = load_run(folder).trained
    tokens: dict[int, list[int]] = {}
    for trained in ledger:
        tokens.setdefault(trained.step, []).append(trained.tokens)
    prompt = fmean(reader.prompts) if reader.prompts else 0.0
    steps = tuple(
        RecordedStep(
            tokens=round(sum(tokens[step]) + prompt * len(tokens[step])),
            seconds=seconds,
            push_s=push_s,
        )
        for step, seconds, push_s in reader.steps
        if step in tokens
    )
    if not steps:
        raise UserError(f"{folder} has no trained step to measure")
    return Recorded(
        lengths=tuple(tuple(reader.lengths.get(m) for m in members) for members in reader.groups),
        rewards=tuple(tuple(reader.rewards.get(m) for m in members) for members in reader.groups),
        prompt_length=prompt,
        steps=steps,
        round_trips=tuple(reader.round_trips),
        scoring=tuple(reader.scoring),
        pulls=tuple(reader.pulls),
    )


class _Reader:
    """Lines, one after the other."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.prompts: list[int] = []
        self.lengths: dict[str, int] = {}
        self.rewards: dict[str, float] = {}
        self.steps: list[tuple[int, float, float]] = []
        self.round_trips: list[float] = []
        self.scoring: list[float] = []
        self.pulls: list[float] = []
        self._prompt: dict[str, int] = {}
        self._done: dict[str, float] = {}
        self._batch: dict[int, float] = {}
        self._sent: dict[str, dict[int, tuple[float, bool]]] = {}

    def take(self, line: dict[str, Any]) -> None:
        """One line."""
        at: float = line["t"]
        match line["k"]:
            case "draw":
                self.groups.append(line["m"])
                self.prompts.append(line["l"])
                self._prompt |= dict.fromkeys(line["m"], line["l"])
            case "done":
                self.lengths[line["id"]] = line["l"] - self._prompt[line["id"]]
                self._done[line["id"]] = at
            case "score":
                self.rewards[line["id"]] = line["raw"]
                if line["id"] in self._done:
                    self.scoring.append(at - self._done.pop(line["id"]))
            case "batch":
                self._batch[line["step"]] = at
            case "trained":
                waited = line["p"]  # for the push before it
                self.steps.append((line["step"], at - self._batch[line["step"]] - waited, 0.0))
            case "push" if "s" in line and self.steps and self.steps[-1][0] == line["v"] - 1:
                step, seconds, _ = self.steps[-1]
                self.steps[-1] = step, seconds + line["s"], line["s"]  # it ran after the step, not in it
            case "route" | "interrupt" | "abort" | "pull" as kind:
                self._sent.setdefault(line["i"], {})[line["q"]] = at, kind == "pull"
            case "report":
                self._acknowledged(line, at)

    def _acknowledged(self, line: dict[str, Any], at: float) -> None:
        sent = self._sent.get(line["i"], {})
        answered = [sent.pop(q) for q in list(sent) if q <= line["q"]]
        pulls = sum(pull for _, pull in answered)
        if pulls and "s" in line:  # without: an earlier pull had brought as new a version
            self.pulls += [line["s"] / pulls] * pulls
        elif not pulls:
            self.round_trips += [at - when for when, _ in answered]
