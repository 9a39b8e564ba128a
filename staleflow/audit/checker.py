"""The audit of a run: one pass over its ledger, sharing no code with its writer.

Without violations it guarantees: every trajectory trained on had V + bound >= step, by the versions read from
the training tensors; it was the consumed trajectory, token for token; no prompt use, group or trajectory was
trained on twice; every batch had its stated size; no line is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from staleflow.audit.entries import OpenEntries
from staleflow.audit.lines import Fields, LedgerLines
from staleflow.audit.report import AuditReport, Findings
from staleflow.audit.steps import Steps

LEDGER_NAME = "ledger.jsonl"
_CHECKPOINT = re.compile(r"step_(\d+)")


def audit_ledger(path: Path | str) -> AuditReport:
    """Check a ledger file, or the ledger of a run folder. Never raises because of the ledger's content.

    The ledger must reach the newest checkpoint beside it; checkpoints are compared by name.
    """
    path = Path(path)
    ledger = path / LEDGER_NAME if path.is_dir() else path
    findings = Findings()
    try:
        if not ledger.is_file():
            findings.add("missing_ledger", f"the ledger {ledger} does not exist")
            return AuditReport(violations=tuple(findings.violations))
        return _Audit(findings, LedgerLines(ledger, findings)).run(ledger.parent)
    except OSError as error:
        findings.add("missing_ledger", f"the ledger {ledger} cannot be read: {error}")
        return AuditReport(violations=tuple(findings.violations))


class _Audit:
    """State of one pass over the lines."""

    def __init__(self, findings: Findings, lines: LedgerLines) -> None:
        self._findings = findings
        self._lines = lines
        self._bound: int | None = None
        self._entries: OpenEntries | None = None
        self._steps: Steps | None = None
        self._end_reason: str | None = None

    def run(self, folder: Path) -> AuditReport:
        """The report. `folder`: the run folder, whose checkpoints the ledger must reach."""
        for fields in self._lines:
            if self._lines.count == 1 and not self._start(fields):
                break
            if self._lines.count > 1:
                self._apply(fields)
        self._findings.line = None
        if not self._lines.count:
            self._findings.add("empty_ledger", "the ledger has no records")
        if self._entries is None or self._steps is None:
            return AuditReport(violations=tuple(self._findings.violations), records=self._lines.count)
        incomplete = self._steps.finish(self._end_reason)
        self._check_checkpoints(folder, self._steps)
        return self._report(self._entries, self._steps, incomplete)

    def _start(self, fields: Fields) -> bool:
        if fields["kind"] != "start":
            self._findings.add("no_start", f"the first record is {fields['kind']}, not start")
            return False
        if fields["bound"] < 0 or fields["batch_size"] < 1 or fields["group_size"] < 1:
            self._findings.add("no_start", "the start record has a constant out of range")
            return False
        self._bound = fields["bound"]
        self._entries = OpenEntries(self._findings, fields)
        self._steps = Steps(self._findings, fields)
        return True

    def _apply(self, fields: Fields) -> None:
        kind, entries, steps = fields["kind"], self._entries, self._steps
        if entries is None or steps is None:
            return
        self._end_reason = None
        match kind:
            case "start":
                self._findings.add("start_twice", "this is a second start record")
            case "consume":
                steps.consume(entries.next_buffer, fields)
                entries.consume(fields)
            case "trained":
                steps.train(fields)
            case "resume":
                steps.resume(fields["step"])
                entries.resume(fields["step"])
            case "end":
                steps.end(fields)
                self._end_reason = fields["reason"]
            case _:
                getattr(entries, kind)(fields)

    def _check_checkpoints(self, folder: Path, steps: Steps) -> None:
        """A ledger cut at a line's end looks like that of a killed run, unless a later checkpoint exists."""
        checkpoints = folder / "checkpoints"
        if not checkpoints.is_dir():
            return
        saved = [int(m.group(1)) for m in map(_CHECKPOINT.fullmatch, _names(checkpoints)) if m]
        if saved and max(saved) > steps.furthest:
            self._findings.add(
                "cut_ledger",
                f"a checkpoint after {max(saved)} steps exists, but the ledger has {steps.furthest} trained "
                "steps",
                step=steps.furthest,
            )

    def _report(self, entries: OpenEntries, steps: Steps, incomplete: str | None) -> AuditReport:
        histogram: Counter[int] = Counter()
        for step in steps.trained:
            histogram.update(step.lags)
        return AuditReport(
            violations=tuple(self._findings.violations),
            records=self._lines.count,
            attempts=self._lines.attempts,
            bound=self._bound,
            steps=len(steps.trained),
            voided_steps=steps.voided,
            trained_groups=sum(step.groups for step in steps.trained),
            trajectories=sum(len(step.members) for step in steps.trained),
            staleness_histogram=dict(sorted(histogram.items())),
            released=dict(entries.released),
            end_reason=self._end_reason,
            torn=self._lines.torn,
            incomplete=incomplete,
        )


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
