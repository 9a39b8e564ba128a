"""The result of an audit: violations that name their offender, and figures of the run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule."""

    code: str
    """The rule, for machines, e.g. `staleness` or `hash_mismatch`."""
    message: str
    """One sentence that names the offender."""
    line: int | None = None
    """Line of the ledger, from 1; None: the file as a whole."""
    step: int | None = None
    group: str | None = None
    trajectory: str | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.message} [{self.code}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit. Steps that a resume voided count in `voided_steps` only."""

    violations: tuple[Violation, ...]
    records: int = 0
    """Readable lines."""
    attempts: int = 0
    bound: int | None = None
    """None: there is no readable start record."""
    steps: int = 0
    """Trained steps."""
    voided_steps: int = 0
    """Steps trained, then voided by a resume."""
    trained_groups: int = 0
    trajectories: int = 0
    """Trained trajectories."""
    staleness_histogram: dict[int, int] = field(default_factory=dict)
    """Step minus oldest weight version -> trained trajectories with at least one generated token."""
    released: dict[str, int] = field(default_factory=dict)
    """Reason -> groups released."""
    end_reason: str | None = None
    """None: the last attempt has no end record, so it was killed or is still running."""
    torn: bool = False
    """The last line is cut off, which is allowed without an end record."""
    incomplete: str | None = None
    """Work that the last attempt left unfinished without breaking a rule; None: nothing."""

    @property
    def ok(self) -> bool:
        """No rule is broken."""
        return not self.violations

    @property
    def max_staleness(self) -> int | None:
        """Largest staleness of a trained trajectory, in versions; None without trained trajectories."""
        return max(self.staleness_histogram, default=None)

    @property
    def mean_staleness(self) -> float | None:
        """Mean over trained trajectories; None without any."""
        count = sum(self.staleness_histogram.values())
        if not count:
            return None
        return sum(lag * times for lag, times in self.staleness_histogram.items()) / count

    def text(self) -> str:
        """The report for people, one line per fact and per violation."""
        lines = [
            f"{self.steps} steps, {self.trained_groups} groups, {self.trajectories} trajectories trained "
            f"in {self.attempts} attempt{'' if self.attempts == 1 else 's'} ({self.records} records)",
            f"staleness: bound {_or_none(self.bound)}, max {_or_none(self.max_staleness)}"
            + "".join(f", {lag}: {times}" for lag, times in sorted(self.staleness_histogram.items())),
        ]
        if self.released:
            lines.append("released: " + ", ".join(f"{n} {why}" for why, n in sorted(self.released.items())))
        if self.voided_steps:
            lines.append(f"voided by resumes: {self.voided_steps} steps")
        if self.end_reason is None:
            lines.append("no end record: the run was killed or is still running")
        if self.torn:
            lines.append("the last line is cut off, as after a kill")
        if self.incomplete:
            lines.append(f"incomplete: {self.incomplete}")
        lines += [f"VIOLATION {violation}" for violation in self.violations]
        lines.append(f"{len(self.violations)} violation{'' if len(self.violations) == 1 else 's'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


class Findings:
    """Violations as they are found, in the order of the ledger."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.line: int | None = None
        """Line being checked."""

    def add(
        self,
        code: str,
        message: str,
        *,
        step: int | None = None,
        group: str | None = None,
        trajectory: str | None = None,
    ) -> None:
        """Add a violation on the line being checked."""
        self.violations.append(
            Violation(
                code=code, message=message, line=self.line, step=step, group=group, trajectory=trajectory
            )
        )


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
