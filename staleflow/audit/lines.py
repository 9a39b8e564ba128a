"""Reads a ledger: every line is an object of a known kind, numbered without gaps, with attempts in order.

Only the last line may be cut off, and only if its attempt has no end record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.audit.report import Findings

Fields = dict[str, Any]

_KINDS: dict[str, dict[str, type]] = {
    "start": {"bound": int, "batch_size": int, "group_size": int, "last_batch": str, "spare_limit": int},
    "resume": {"step": int},
    "reserve": {"group": str, "version": int, "spare": bool},
    "lower": {"group": str, "version": int},
    "occupy": {"group": str},
    "release": {"group": str, "reason": str},
    "promote": {"group": str},
    "swap": {"spare": str, "firm": str},
    "consume": {"buffer": int, "final": bool, "groups": list},
    "trained": {"step": int, "version": int, "trajectories": list},
    "end": {"steps": int, "reason": str},
}
_HEAD: dict[str, type] = {"seq": int, "attempt": int, "kind": str}
_CONSUMED_GROUP: dict[str, type] = {"group": str, "version": int, "trajectories": list}
_CONSUMED_MEMBER: dict[str, type] = {"id": str, "hash": str}
_TRAINED_MEMBER: dict[str, type] = {"id": str, "min": int, "max": int, "tokens": int, "hash": str}
_WORDS = {
    ("start", "last_batch"): {"train", "drop", "pad"},
    ("release", "reason"): {"filtered", "aborted", "failed", "expired", "discarded"},
    ("end", "reason"): {"completed", "exhausted", "interrupted", "filtered_out"},
}


class LedgerLines:
    """The readable lines of a ledger file; problems with other lines go to the findings."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self.torn = False
        """After iteration: the last line is cut off."""
        self.count = 0
        """Readable lines so far."""
        self.attempts = 0
        """Attempts so far."""
        self._path = path
        self._findings = findings
        self._seq = 0
        self._attempt: int | None = None
        self._ended = False

    def __iter__(self) -> Iterator[Fields]:
        findings = self._findings
        with self._path.open("rb") as file:
            unreadable: tuple[int, str] | None = None
            for number, raw in enumerate(file, start=1):
                if unreadable:
                    self._report_unreadable(*unreadable)
                findings.line = number
                parsed = _parse(raw)
                if isinstance(parsed, str):
                    unreadable = (number, parsed)
                    continue
                unreadable = None
                self._check_numbers(parsed)
                self.count += 1
                yield parsed
            if unreadable and (self._ended or not self.count):
                self._report_unreadable(*unreadable)
            self.torn = unreadable is not None
        findings.line = None

    def _report_unreadable(self, number: int, why: str) -> None:
        self._findings.line = number
        self._findings.add("unreadable_line", f"the line is not a ledger record: {why}")

    def _check_numbers(self, fields: Fields) -> None:
        seq, attempt, kind = fields["seq"], fields["attempt"], fields["kind"]
        if seq != self._seq:
            self._findings.add("seq_gap", f"seq is {seq} instead of {self._seq}")
        self._seq = seq + 1
        if self._attempt is None:
            self.attempts = 1
        elif kind == "resume":
            self.attempts += 1
            if attempt <= self._attempt:
                self._findings.add(
                    "attempt_order",
                    f"resume has attempt {attempt}, which is not above the previous attempt {self._attempt}",
                )
        elif attempt != self._attempt:
            self._findings.add(
                "attempt_order", f"attempt changes from {self._attempt} to {attempt} without a resume"
            )
        if self._ended and kind != "resume":
            self._findings.add("after_end", f"a {kind} record follows the end record of attempt {attempt}")
        self._attempt = attempt
        self._ended = kind == "end"


def _parse(raw: bytes) -> Fields | str:
    """The fields of a line, or the problem with it."""
    try:
        fields = json.loads(raw)
    except ValueError as error:
        return f"not valid JSON ({error})"
    if not isinstance(fields, dict):
        return "not a JSON object"
    wrong = _wrong_type(fields, _HEAD)
    if wrong:
        return wrong
    kind = fields["kind"]
    if kind not in _KINDS:
        return f"unknown kind {kind!r}"
    return _wrong_type(fields, _KINDS[kind]) or _wrong_inside(kind, fields) or fields


def _wrong_inside(kind: str, fields: Fields) -> str | None:
    if kind == "consume":
        for group in fields["groups"]:
            wrong = _wrong_type(group, _CONSUMED_GROUP) or next(
                filter(None, (_wrong_type(m, _CONSUMED_MEMBER) for m in group["trajectories"])), None
            )
            if wrong:
                return wrong
    if kind == "trained":
        return next(filter(None, (_wrong_type(m, _TRAINED_MEMBER) for m in fields["trajectories"])), None)
    for (of_kind, name), words in _WORDS.items():
        if of_kind == kind and fields[name] not in words:
            return f"{name} is {fields[name]!r}, not one of {', '.join(sorted(words))}"
    return None


def _wrong_type(fields: Any, types: dict[str, type]) -> str | None:
    if not isinstance(fields, dict):
        return f"{fields!r} is not an object"
    for name, kind in types.items():
        if type(fields.get(name)) is not kind:
            return f"{name} is {fields.get(name)!r}, not of type {kind.__name__}"
    return None
