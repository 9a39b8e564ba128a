"""The lives of trajectories, groups and steps, put together from a run's journal and ledger.

Invariants: the ledger says what happened, the journal when: a record's time is that of its `ledger` line.
Only what is asked for is kept, so that memory is that of the answer, not of the run. An attempt that was
killed leaves the end of its lives open; the next attempt voids them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from staleflow.errors import RunFolderError
from staleflow.protocol.records import (
    Consume,
    End,
    Lower,
    Occupy,
    Promote,
    Record,
    Release,
    Reserve,
    Resume,
    Start,
    Swap,
    Trained,
)
from staleflow.reporting.followed import Followed, Wanted
from staleflow.reporting.lives import GroupLife, StepLife
from staleflow.storage.journal import Line, read_journal
from staleflow.storage.ledger import read_ledger


class Story(Followed):
    """What a run folder tells of the groups that are wanted, and of its steps."""

    def __init__(self, folder: Path, wanted: Wanted, *, only_alive: bool = False) -> None:
        """`wanted(group, members)` says which groups to follow; `only_alive` forgets them when they are over.

        Raises RunFolderError without a journal.
        """
        super().__init__(wanted)
        self.steps: dict[tuple[int, int], StepLife] = {}
        """By attempt and step."""
        self.batch_size = 0
        self.end = 0.0
        """Time of the newest line, in the newest attempt."""
        self.finished = ""
        self._forget = only_alive
        self._records = iter(records_of(folder))
        self._ahead: tuple[int, int, Record] | None = next(self._records, None)
        lines: dict[str, Callable[[float, Any], None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }
        for line in journal_of(folder):
            take = lines.get(line["k"])
            if line["k"] != "begin":
                self.end = line["t"]
            if take is not None:
                take(line["t"], line)
        self._catch_up(self.end, None)

    # ------------------------------------------------------------------ attempts

    def _on_begin(self, t: float, line: Line) -> None:
        if self.end or self.groups:
            self._catch_up(self.end, None, before_attempt=line["a"])
            for life in self._lives.values():
                self._end(life, self.end)
                life.fate = "void"
                life.tell(self.end, f"attempt {self.attempt} was over; attempt {line['a']} began with step "
                                    f"{line['step']}, and its prompt is drawn anew")  # fmt: skip
            self._lives.clear()
            if self._forget:
                self.groups.clear()
        self.attempt, self.end, self.finished = line["a"], t, ""
        self._versions.clear()

    # ------------------------------------------------------------------ steps

    def _step(self, step: int) -> StepLife:
        return self.steps.setdefault((self.attempt, step), StepLife(attempt=self.attempt, step=step))

    def _on_push(self, t: float, line: Line) -> None:
        step = self._step(line["v"])
        step.idle_since = t if step.idle_since is None else step.idle_since  # else free before its push
        if "s" in line and (self.attempt, line["v"] - 1) in self.steps:
            self._step(line["v"] - 1).push_s = line["s"]

    def _on_batch(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.batch_at = t
        step.idle_since = t - line["s"]  # as the loop measured it

    def _on_trained(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.trained_at, step.update_s, step.push_s = t, line["u"], line["p"]
        self._step(line["step"] + 1).idle_since = t

    def _on_finish(self, t: float, line: Line) -> None:
        self.finished = line.get("why", "ended")

    # ------------------------------------------------------------------ the ledger's records

    def _on_ledger(self, t: float, line: Line) -> None:
        self._catch_up(t, line["q"])

    def _catch_up(self, t: float, seq: int | None, before_attempt: int | None = None) -> None:
        """Take records up to a number (None: all that are left, or all of earlier attempts)."""
        while self._ahead is not None:
            number, attempt, record = self._ahead
            if seq is not None and number > seq:
                return
            if before_attempt is not None and attempt >= before_attempt:
                return
            self._record(t, record)
            self._ahead = next(self._records, None)

    def _record(self, t: float, record: Record) -> None:
        match record:
            case Start():
                self.bound, self.batch_size = record.bound, record.batch_size
            case Resume(step=step):
                self.next_step = step
                self._void(step)
            case Reserve() | Lower() if record.group in self.groups:
                group = self.groups[record.group]
                group.version = record.version
                group.reserved_at = t if group.reserved_at is None else group.reserved_at
            case Occupy() if record.group in self.groups:
                self._occupied(t, self.groups[record.group])
            case Promote():
                self._tell_group(t, record.group, "its group, a spare, is firm now")
            case Swap():
                self._tell_group(t, record.spare, f"its group, a spare, takes the place of {record.firm}")
                self._tell_group(
                    t, record.firm, f"its group is a spare now: {record.spare} was complete first"
                )
            case Release():
                self._released(record)
            case Consume():
                self._consumed(t, record)
            case Trained():
                self._trained(t, record)
            case End(reason=reason):
                self.finished = reason

    def _void(self, step: int) -> None:
        for group in self.groups.values():
            if group.step is None or group.step < step or group.attempt == self.attempt:
                continue
            for life in group.lives:
                if life.fate != "void":
                    text = f"its training is void: attempt {self.attempt} resumed at step {step}, before it"
                    life.tell(life.events[-1][0], text)
                    life.fate = "void"

    def _released(self, record: Release) -> None:
        step = self.steps.get((self.attempt, self.next_step))
        if step is not None and step.batch_at is None:
            step.released[record.reason] += 1
        if self._forget:
            self.groups.pop(record.group, None)

    def _occupied(self, t: float, group: GroupLife) -> None:
        group.occupied_at = t
        last = group.last_rewarded
        for life in self._alive(group.group_id):
            whose = "its own" if life is last else f"that of {last.trajectory_id}"
            life.tell(t, f"its group is complete, the last reward {whose}")

    def _consumed(self, t: float, record: Consume) -> None:
        self.next_step = record.buffer + 1
        for taken in record.groups:
            group = self.groups.get(taken.group)
            if group is None:
                continue
            group.step, group.version = record.buffer, taken.version
            for life in self._alive(taken.group):
                text = f"handed to the trainer in the batch of step {record.buffer}"
                life.tell(t, f"{text} (V = {taken.version}, η = {self.bound})")
                self._end(life, t)
                life.fate = f"handed to the trainer in step {record.buffer}"

    def _trained(self, t: float, record: Trained) -> None:
        for member in record.trajectories:
            life = self._lives.pop(member.id, None)
            if life is None:
                continue
            by = (
                f"version {member.min}"
                if member.min == member.max
                else f"versions {member.min} to {member.max}"
            )
            if self._forget:
                self.groups.pop(life.group.group_id, None)
            lag = record.version - member.min
            if member.tokens:
                life.fate = f"trained in step {record.step} with staleness {lag}"
                life.tell(t, f"{life.fate} (η = {self.bound}): {member.tokens} tokens of {by}")
            else:
                life.fate = f"masked in step {record.step}"
                life.tell(t, life.fate)


def journal_of(folder: Path) -> Iterator[Line]:
    """Lines of a run's journal. Raises RunFolderError when it has none."""
    path = folder / "journal.jsonl"
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder}")
    if not path.is_file():
        raise RunFolderError(
            f"{folder} has no journal.jsonl, so there is nothing to tell from: runs write one unless "
            "telemetry.journal is false"
        )
    return read_journal(path)


def records_of(folder: Path) -> Iterator[tuple[int, int, Record]]:
    """Records of a run's ledger; none when it has no ledger yet."""
    path = folder / "ledger.jsonl"
    return read_ledger(path) if path.is_file() else iter(())
