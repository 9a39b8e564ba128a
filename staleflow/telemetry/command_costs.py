"""What commands and instances cost in one attempt: counts, seconds, the time in `Control`, preemptions.

Invariants: every figure is a total of this attempt and never falls; a lost incarnation's figures stay in;
`migrate` is part of `interrupt`, `step_seconds` and `handle_seconds` make up `seconds`.

Seconds of commands are those for which the instances stood still for them, as they report it. An instance
does not tell one Interrupt from another, so the time of those that migration ordered is their share among
the Interrupts that a report acknowledges.
"""

from __future__ import annotations

from collections import deque

from staleflow.coordination.actions import Interrupt
from staleflow.coordination.events import InstanceReport
from staleflow.telemetry.events import CommandSent, ControlRan, Handlers, ReportReceived

KINDS = ("route", "interrupt", "abort", "pull")
MIGRATION = "migration"
"""How the reason of an Interrupt begins that migration ordered."""


class CommandCosts:
    """A listener that accumulates command counts and timings."""

    def __init__(self) -> None:
        self.preemptions: dict[str, int] = {}
        """By instance, over its incarnations."""
        self._counts = dict.fromkeys((*KINDS, "migrate"), 0)
        self._seconds = dict.fromkeys((*KINDS, "migrate"), 0.0)
        self._decoding_s = 0.0
        self._step_s = 0.0
        self._handle_s = 0.0
        self._last: dict[str, InstanceReport] = {}
        self._interrupts: dict[str, deque[Interrupt]] = {}
        self._taken = self.totals()

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {CommandSent: self._sent, ControlRan: self._ran, ReportReceived: self._reported}

    def _sent(self, event: CommandSent) -> None:
        command = event.command
        self._counts[type(command).__name__.lower()] += 1
        if isinstance(command, Interrupt):
            self._counts["migrate"] += _migrates(command)
            self._interrupts.setdefault(command.instance, deque()).append(command)

    def _ran(self, event: ControlRan) -> None:
        if event.in_cycle:
            self._step_s += event.cpu_s
        else:
            self._handle_s += event.cpu_s

    def _reported(self, event: ReportReceived) -> None:
        report = event.report
        last = self._last.get(report.instance)
        if last is None or last.incarnation != report.incarnation:
            last = InstanceReport(
                instance=report.instance, incarnation=report.incarnation, revision=0, version=-1, acked_seq=0
            )
        self._last[report.instance] = report
        interrupt_s = report.interrupt_seconds - last.interrupt_seconds
        self._seconds["route"] += report.route_seconds - last.route_seconds
        self._seconds["interrupt"] += interrupt_s
        self._seconds["abort"] += report.abort_seconds - last.abort_seconds
        self._decoding_s += report.busy_seconds - last.busy_seconds
        self._seconds["pull"] += report.pull_seconds - last.pull_seconds
        self._seconds["migrate"] += interrupt_s * self._migrated_share(report)
        preempted = report.preemptions - last.preemptions
        self.preemptions[report.instance] = self.preemptions.get(report.instance, 0) + preempted

    def _migrated_share(self, report: InstanceReport) -> float:
        """Share of migration's among the Interrupts that the report acknowledges."""
        waiting = self._interrupts.get(report.instance)
        applied: list[bool] = []
        while waiting and waiting[0].incarnation <= report.incarnation:
            if waiting[0].incarnation == report.incarnation:
                if waiting[0].seq > report.acked_seq:
                    break
                applied.append(_migrates(waiting[0]))
            waiting.popleft()
        return sum(applied) / len(applied) if applied else 0.0

    def take(self) -> dict[str, float]:
        """What was added to the totals since the last call."""
        before, self._taken = self._taken, self.totals()
        return {name: value - before[name] for name, value in self._taken.items()}

    def totals(self) -> dict[str, float]:
        """Metric names and values, of the whole attempt."""
        values: dict[str, float] = {f"coord/{kind}_count": count for kind, count in self._counts.items()}
        values |= {f"coord/{kind}_seconds": seconds for kind, seconds in self._seconds.items()}
        values["coord/step_seconds"] = self._step_s
        values["coord/handle_seconds"] = self._handle_s
        values["coord/seconds"] = self._step_s + self._handle_s
        values["timing_s/pull"] = self._seconds["pull"]
        values["time/decoding_s"] = self._decoding_s
        values["rollout/preemptions"] = sum(self.preemptions.values())
        return values


def _migrates(command: Interrupt) -> bool:
    return command.reason.startswith(MIGRATION)
