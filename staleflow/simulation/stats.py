"""What is counted during a simulated run: a listener. Memory: a few numbers for each step and instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.events import InstanceReport
from staleflow.simulation.instance import SimulatedInstance
from staleflow.simulation.result import InstanceRow, SimulationResult, StepRow
from staleflow.simulation.store import TOKEN_FATES
from staleflow.telemetry.events import (
    BatchTaken,
    Handlers,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
)

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


class SimulationStats:
    """Listens to the run; the fleet adds commands, reports and ended instances. `result` sums up."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now`: simulated seconds."""
        self.tokens = Counter(dict.fromkeys(TOKEN_FATES, 0))
        """Tokens by what became of them; counted by the trajectory store."""
        self._now = now
        self.commands: dict[type[Command], int] = dict.fromkeys(COMMANDS, 0)
        self._cycles = 0
        self._resampled = 0
        self._truncated = 0
        self._finished = 0
        self._rejections = 0
        self._prefilled = 0
        self._staleness: Counter[int] = Counter()
        self._open: tuple[StepRow, Counter[int]] | None = None
        self._steps: list[StepRow] = []
        self._instances: dict[str, _Sum] = {}

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            TurnEnded: self._turned,
            StragglerResampled: self._on_resampled,
            StragglerTruncated: self._on_truncated,
            BatchTaken: self._batch,
            StepTrained: self._trained,
        }

    def reported(self, report: InstanceReport) -> None:
        """An instance reports."""
        self._finished += len(report.finished)
        self._rejections += len(report.rejections)

    def _turned(self, event: TurnEnded) -> None:
        self._cycles += event.cycled

    def _on_resampled(self, event: StragglerResampled) -> None:
        self._resampled += 1

    def _on_truncated(self, event: StragglerTruncated) -> None:
        self._truncated += 1

    def _batch(self, event: BatchTaken) -> None:
        step, began = event.step, self._now()
        members = [s.trajectory for group in event.groups for s in group]
        lags = Counter([step - (step if t.min_version is None else t.min_version) for t in members])
        row = StepRow(
            step=step,
            began=began,
            ended=began,
            waited=event.waited_s,
            tokens=sum([t.response_len for t in members]),
            trajectories=len(members),
            staleness_mean=sum(lag * count for lag, count in lags.items()) / len(members),
            staleness_max=max(lags),
        )
        self._open = (row, lags)

    def _trained(self, event: StepTrained) -> None:
        assert self._open is not None
        row, lags = self._open
        self._open = None
        self._steps.append(replace(row, ended=self._now()))
        self._staleness.update(lags)

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
            tokens={"generated": generated, **self.tokens},
            staleness=dict(sorted(self._staleness.items())),
            commands={kind.__name__.lower(): count for kind, count in self.commands.items()},
            rejections=self._rejections,
            cycles=self._cycles,
            resampled=self._resampled,
            truncated=self._truncated,
            finished=self._finished,
            prefilled=self._prefilled,
        )
