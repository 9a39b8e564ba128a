"""Read a run's folder into plain values.

- A file may be missing, may end in a torn line, and may grow while it is read: whole lines are used.
- What a resume voided is left out: when a training step is seen again, earlier rows of this step and of later
  ones are dropped, and so are evaluations of the versions that they made.
- Seconds continue across attempts: an attempt that counts from zero is shifted behind the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from staleflow.audit import audit_ledger
from staleflow.errors import RunFolderError

Values = Mapping[str, Any]
"""One row of metrics.jsonl without its null values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """One trajectory of a `trained` record of the ledger."""

    step: int
    min_version: int
    max_version: int
    tokens: int
    """Generated tokens."""

    @property
    def staleness(self) -> int:
        """Versions by which the oldest token lags."""
        return self.step - self.min_version


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSummary:
    """The result of auditing the run's ledger."""

    violations: int | None
    """None if there is no ledger, or it cannot be read."""
    text: str

    @property
    def clean(self) -> bool | None:
        """None if the ledger was not audited."""
        return None if self.violations is None else self.violations == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report needs of one run."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    config_text: str
    """config.yaml itself, versions and git state included."""
    train: tuple[Values, ...]
    """By `train/step`, ascending; a step trained again after a resume is in it once."""
    evals: tuple[Values, ...]
    """By `eval/weight_version`, ascending."""
    instances: tuple[Values, ...]
    """By `run/seconds`."""
    events: tuple[Values, ...]
    summary: Values
    """Empty while the run is running, or if it was killed."""
    bound: int | None
    """η of the run, from the ledger's first record (policy sync has 0, whatever the config says); from the
    config if there is no ledger."""
    trained: tuple[TrainedRow, ...]
    audit: AuditSummary
    simulation: Mapping[str, Any]
    """simulation.json: the costs that a simulated run used; empty for a real run."""
    skipped_lines: int
    """Lines that are not JSON objects: in a healthy run, only torn ones."""


def load_run(folder: Path) -> RunData:
    """Read one run. Raises RunFolderError if the folder is not a run folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; give the folder of a run, such as runs/<name>")
    metrics, ledger = folder / "metrics.jsonl", folder / "ledger.jsonl"
    if not metrics.exists() and not ledger.exists():
        raise RunFolderError(f"{folder} is not a run folder: it has neither metrics.jsonl nor ledger.jsonl")
    rows, torn_rows = _objects(metrics)
    records, torn_records = _objects(ledger)
    kept = _Rows(rows)
    config_text, config = _config(folder / "config.yaml")
    name = setting(config, "run", "name")
    return RunData(
        folder=folder,
        name=str(name or folder.resolve().name),
        config=config,
        config_text=config_text,
        train=tuple(kept.train[step] for step in sorted(kept.train)),
        evals=tuple(kept.evals[version] for version in sorted(kept.evals)),
        instances=tuple(sorted(kept.instances, key=lambda row: row.get("run/seconds", 0.0))),
        events=tuple(kept.events),
        summary=kept.summary,
        bound=_bound(records, config),
        trained=tuple(_trained(records)),
        audit=_audit(ledger),
        simulation=_simulation(folder / "simulation.json"),
        skipped_lines=torn_rows + torn_records,
    )


class _Rows:
    """Sorts rows by kind, in file order, and drops those that later rows void."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.train: dict[int, Values] = {}
        self.evals: dict[int, Values] = {}
        self.instances: list[Values] = []
        self.events: list[Values] = []
        self.summary: Values = {}
        self._offset = self._last = 0.0
        for row in rows:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        kind = row.get("kind")
        values = {k: v for k, v in row.items() if v is not None and k != "kind"}
        self._continue_seconds(values)
        if kind == "train" and isinstance(step := values.get("train/step"), int):
            if step <= max(self.train, default=-1):
                self.train = {s: v for s, v in self.train.items() if s < step}
                self.evals = {version: v for version, v in self.evals.items() if version <= step}
            self.train[step] = values
            self.summary = {}
        elif kind == "eval" and isinstance(version := values.get("eval/weight_version"), int):
            self.evals[version] = values
        elif kind == "instances":
            self.instances.append(values)
        elif kind == "event":
            self.events.append(values)
        elif kind == "summary":
            self.summary = values

    def _continue_seconds(self, values: dict[str, Any]) -> None:
        seconds = values.get("run/seconds")
        if not isinstance(seconds, int | float):
            return
        # Rows of one attempt may be slightly out of order; a new attempt starts near zero.
        if seconds + self._offset < self._last - 1.0 and seconds < 0.5 * (self._last - self._offset):
            self._offset = self._last
        values["run/seconds"] = seconds + self._offset
        self._last = max(self._last, seconds + self._offset)


def _objects(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a file of lines, and the number of other lines."""
    if not path.exists():
        return [], 0
    found: list[dict[str, Any]] = []
    skipped = 0
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                skipped += 1
                continue
            if isinstance(value, dict):
                found.append(value)
            else:
                skipped += 1
    return found, skipped


def _bound(records: Sequence[dict[str, Any]], config: Mapping[str, Any]) -> int | None:
    start = next((record for record in records if record.get("kind") == "start"), None)
    section = start if start is not None else config.get("staleness")
    bound = section.get("bound") if isinstance(section, Mapping) else None
    return bound if isinstance(bound, int) else None


def _trained(records: Sequence[dict[str, Any]]) -> Iterator[TrainedRow]:
    """Yield the trajectories that were trained on and not voided by a later resume, by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record.get("kind") == "resume":
            steps = {step: kept for step, kept in steps.items() if step < record["step"]}
        elif record.get("kind") == "trained":
            steps[record["step"]] = record["trajectories"]
    for step in sorted(steps):
        for item in steps[step]:
            yield TrainedRow(
                step=step, min_version=item["min"], max_version=item["max"], tokens=item["tokens"]
            )


def _audit(ledger: Path) -> AuditSummary:
    if not ledger.exists():
        return AuditSummary(violations=None, text="no ledger")
    try:
        violations = len(audit_ledger(ledger).violations)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return AuditSummary(violations=None, text=f"ledger unreadable: {error}")
    return AuditSummary(violations=violations, text=f"{violations} violation{'' if violations == 1 else 's'}")


def _simulation(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the config's text and values; empty if there is none, or only half of one."""
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return "", {}
    return text, value if isinstance(value, dict) else {}


def setting(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a value of the config; None if it is not there."""
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None


def bound_rates(run: RunData) -> dict[str, float]:
    """Return the limits that rollout, trainer and latency set a simulated run, in trained tokens/s."""
    bounds = run.simulation.get("bounds")
    if not isinstance(bounds, Mapping):
        return {}
    return {
        side: float(bounds[side]) for side in ("rollout", "trainer", "latency") if _finite(bounds.get(side))
    }


def series(rows: Iterable[Values], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the points (x, y) of the rows that have both as finite numbers."""
    points = [(row[x], row[y]) for row in rows if _finite(row.get(x)) and _finite(row.get(y))]
    return [float(a) for a, _ in points], [float(b) for _, b in points]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
