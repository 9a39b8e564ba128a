"""What is counted during a simulated run. Memory: a few numbers for each step and instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.events import InstanceReport
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.result import InstanceRow, SimulationResult, StepRow
from staleflow.simulation.trajectory import SimulatedTrajectory

TOKEN_FATES = ("trained", "filtered", "failed", "aborted", "expired", "discarded", "lost", "in_flight")
"""What becomes of a generated token: the columns of the balance."""
COMMANDS = (Route, Interrupt, Abort, Pull)


@dataclass(slots=True)
class _Sum:
    """One instance, over its incarnations."""

    up: float = 0.0
    busy: float = 0.0
    prefill: float = 0.0
    pulling: float = 0.0
    generated: int = 0
    pulls: int = 0
    preemptions: int = 0
    steps: int = 0
    running_steps: int = 0


class Measures:
    """Fed by the cluster; `result` sums up."""

    def __init__(self) -> None:
        self.tokens = Counter(dict.fromkeys(TOKEN_FATES, 0))
        self.commands: dict[type[Command], int] = dict.fromkeys(COMMANDS, 0)
        self.cycles = 0
        self.resampled = 0
        self.truncated = 0
        self._finished = 0
        self._rejections = 0
        self._prefilled = 0
        self._staleness: Counter[int] = Counter()
        self._open: tuple[StepRow, Counter[int]] | None = None
        self._steps: list[StepRow] = []
        self._instances: dict[str, _Sum] = {}

    def reported(self, report: InstanceReport) -> None:
        """A report has come."""
        self._finished += len(report.finished)
        self._rejections += len(report.rejections)

    def begin_step(
        self, step: int, members: Sequence[SimulatedTrajectory], *, began: float, idle_since: float
    ) -> None:
        """A batch was handed out."""
        lags = Counter([step - (step if t.min_version is None else t.min_version) for t in members])
        row = StepRow(
            step=step,
            began=began,
            ended=began,
            waited=began - idle_since,
            tokens=sum(t.response for t in members),
            trajectories=len(members),
            staleness_mean=sum(lag * count for lag, count in lags.items()) / len(members),
            staleness_max=max(lags),
        )
        self._open = (row, lags)

    def end_step(self, *, ended: float) -> None:
        """It is trained, and the new weights are pushed."""
        assert self._open is not None
        row, lags = self._open
        self._open = None
        self._steps.append(replace(row, ended=ended))
        self._staleness.update(lags)
        self.tokens["trained"] += row.tokens

    def left(self, instance: SimulatedInstance, now: float) -> None:
        """An incarnation came to its end."""
        total = self._instances.setdefault(instance.instance, _Sum())
        total.up += max(now, instance.at) - instance.began
        total.busy += instance.busy_s
        total.prefill += instance.prefill_s
        total.pulling += instance.pull_s
        total.generated += instance.generated
        total.pulls += instance.pulls
        total.preemptions += instance.preemptions
        total.steps += instance.steps
        total.running_steps += instance.running_steps
        self._prefilled += instance.prefilled

    @property
    def generated(self) -> int:
        """Tokens that incarnations generated which came to their end."""
        return sum(total.generated for total in self._instances.values())

    def result(self, reason: str, seconds: float) -> SimulationResult:
        """The sum of it all."""
        tokens = dict(self.tokens)
        if self._open is not None:
            tokens["in_flight"] += self._open[0].tokens
        generated = self.generated
        rows = tuple(
            InstanceRow(
                instance=name,
                up=total.up,
                busy=total.busy,
                prefill=total.prefill,
                pulling=total.pulling,
                generated=total.generated,
                pulls=total.pulls,
                preemptions=total.preemptions,
                running_mean=total.running_steps / total.steps if total.steps else 0.0,
            )
            for name, total in sorted(self._instances.items(), key=lambda item: int(item[0].split("-")[-1]))
        )
        return SimulationResult(
            reason=reason,
            seconds=seconds,
            steps=tuple(self._steps),
            instances=rows,
            tokens={"generated": generated, **tokens},
            staleness=dict(sorted(self._staleness.items())),
            commands={kind.__name__.lower(): count for kind, count in self.commands.items()},
            rejections=self._rejections,
            cycles=self.cycles,
            resampled=self.resampled,
            truncated=self.truncated,
            finished=self._finished,
            prefilled=self._prefilled,
        )
