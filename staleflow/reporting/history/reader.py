"""A run's history, from one reading of its journal and ledger.

Invariants: the ledger says what happened, the journal when: a record's time is that of its `ledger` line.
Only what is asked for is kept, so that memory is that of the answer, not of the run. An attempt that was
killed leaves the end of its histories open; the next attempt voids them. A trajectory is under an instance in
`_on` exactly while its state is running there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
from staleflow.reporting.history.lives import GroupHistory, StepHistory, TrajectoryHistory
from staleflow.reporting.history.moves import Move, Moves, journal_lines
from staleflow.reporting.history.sentences import (
    SENTENCES,
    arrival_sentence,
    pull_sentence,
    route_sentence,
)
from staleflow.storage.journal import Line
from staleflow.storage.ledger import read_ledger

Wanted = Callable[[str, tuple[str, ...]], bool]


class History:
    """The groups that are wanted, and all training steps."""

    def __init__(self, folder: Path, wanted: Wanted, *, only_alive: bool = False) -> None:
        """`wanted(group, members)` says which groups to keep; `only_alive` drops them when they are over.

        Raises RunFolderError without a journal.
        """
        self.groups: dict[str, GroupHistory] = {}
        self.steps: dict[tuple[int, int], StepHistory] = {}
        """By attempt and step."""
        self.bound = self.batch_size = 0
        self.next_step = self.attempt = 0
        self.end = 0.0
        """Time of the newest line, in the newest attempt."""
        self.finished = ""
        self._wanted = wanted
        self._only_alive = only_alive
        self._moves = Moves()
        self._alive: dict[str, TrajectoryHistory] = {}
        self._on: dict[str, dict[str, TrajectoryHistory]] = {}
        self._versions: dict[str, int] = {}
        """Loaded version by instance."""
        self._records = iter(ledger_records(folder))
        self._ahead: tuple[int, int, Record] | None = next(self._records, None)
        self._takers: dict[str, Callable[[float, Line], None]] = {
            "begin": self._begin,
            "join": self._join,
            "lost": self._lost,
            "report": self._report,
            "draw": self._draw,
            "route": self._route,
            "interrupt": self._interrupt,
            "resample": self._resample,
            "push": self._push,
            "batch": self._batch,
            "trained": self._trained,
            "ledger": self._ledger,
            "finish": self._finish,
        }
        for line in journal_lines(folder):
            if line["k"] != "begin":
                self.end = line["t"]
            self._takers.get(line["k"], self._move)(line["t"], line)
        self._catch_up(self.end, None)

    # ------------------------------------------------------------------ attempts and instances

    def _begin(self, t: float, line: Line) -> None:
        if self.end or self.groups:
            self._catch_up(self.end, None, before_attempt=line["a"])
            for one in self._alive.values():
                one.leave(self.end)
                one.fate = "void"
                one.add(self.end, f"attempt {self.attempt} ended; attempt {line['a']} began with step "
                                  f"{line['step']} and draws the prompt again")  # fmt: skip
            self._alive.clear()
            if self._only_alive:
                self.groups.clear()
        self._moves.take(line)
        self._on.clear()
        self._versions.clear()
        self.attempt, self.end, self.finished = line["a"], t, ""

    def _join(self, t: float, line: Line) -> None:
        self._versions[line["i"]] = line["v"]

    def _lost(self, t: float, line: Line) -> None:
        self._move(t, line)
        self._versions.pop(line["i"], None)

    def _report(self, t: float, line: Line) -> None:
        instance, version = line["i"], line["v"]
        pulled = version != self._versions.get(instance)
        self._versions[instance] = version
        for one in self._on.get(instance, {}).values():
            if not one.arrived and self._moves.route_of(one.trajectory_id) <= line["q"]:
                one.arrived = True
                one.add(t, arrival_sentence(line))
            elif pulled and one.arrived:
                one.add(t, pull_sentence(line))
        self._move(t, line)

    # ------------------------------------------------------------------ trajectories

    def _move(self, t: float, line: Line) -> None:
        """Apply a line of which there is a sentence for each trajectory that it moves."""
        sentence = SENTENCES.get(line["k"])
        for move in self._moves.take(line):
            one = self._alive.get(move.trajectory_id)
            if one is None:
                continue
            if sentence is not None:
                one.add(t, sentence(line, one, t - one.now.since if one.stays else 0.0))
            self._apply(t, one, move)
            if move.why == "released":
                del self._alive[one.trajectory_id]
                one.fate = f"released: {line.get('why', '')}"

    def _apply(self, t: float, one: TrajectoryHistory, move: Move) -> None:
        self._on.get(move.left, {}).pop(one.trajectory_id, None)
        if move.state is None:
            one.leave(t)
            return
        one.enter(t, move.state, move.instance)
        if move.instance:
            self._on.setdefault(move.instance, {})[one.trajectory_id] = one
            one.routed, one.arrived = True, False

    def _draw(self, t: float, line: Line) -> None:
        if not self._wanted(line["g"], tuple(line["m"])):
            return
        group = GroupHistory(group_id=line["g"], attempt=self.attempt, drawn_at=t)
        self.groups[line["g"]] = group
        for trajectory_id in line["m"]:
            self._new_member(group, trajectory_id)
        self._move(t, line)

    def _new_member(self, group: GroupHistory, trajectory_id: str) -> TrajectoryHistory:
        one = TrajectoryHistory(trajectory_id=trajectory_id, group=group)
        group.members[trajectory_id] = self._alive[trajectory_id] = one
        return one

    def _route(self, t: float, line: Line) -> None:
        (move,) = self._moves.take(line)
        one = self._alive.get(move.trajectory_id)
        if one is not None:
            waited = t - one.now.since
            one.add(t, route_sentence(line, one, waited, next_step=self.next_step, bound=self.bound))
            self._apply(t, one, move)

    def _interrupt(self, t: float, line: Line) -> None:
        self._moves.take(line)
        one = self._alive.get(line["id"])
        if one is not None:
            one.add(t, SENTENCES["interrupt"](line, one, 0.0))

    def _resample(self, t: float, line: Line) -> None:
        dropped, drawn = self._moves.take(line)
        one = self._alive.pop(line["id"], None)
        if one is None:
            return
        one.add(t, SENTENCES["resample"](line, one, 0.0))
        self._apply(t, one, dropped)
        one.fate = f"dropped for {line['to']}"
        new = self._new_member(one.group, line["to"])
        new.add(t, f"replaces {line['id']} in its group, from the prompt on")
        self._apply(t, new, drawn)

    # ------------------------------------------------------------------ steps

    def _step(self, step: int) -> StepHistory:
        return self.steps.setdefault((self.attempt, step), StepHistory(attempt=self.attempt, step=step))

    def _push(self, t: float, line: Line) -> None:
        step = self._step(line["v"])
        step.idle_since = t if step.idle_since is None else step.idle_since  # else free before its push
        if "s" in line and (self.attempt, line["v"] - 1) in self.steps:
            self._step(line["v"] - 1).push_s = line["s"]

    def _batch(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.batch_at = t
        step.idle_since = t - line["s"]  # as the loop measured it

    def _trained(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.trained_at, step.update_s, step.push_s = t, line["u"], line["p"]
        self._step(line["step"] + 1).idle_since = t

    def _finish(self, t: float, line: Line) -> None:
        self.finished = line.get("why", "ended")

    # ------------------------------------------------------------------ the ledger's records

    def _ledger(self, t: float, line: Line) -> None:
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
                self._tell(t, record.group, "its group, a spare, became firm")
            case Swap():
                self._tell(t, record.spare, f"its group, a spare, takes the place of {record.firm}")
                self._tell(t, record.firm, f"its group became a spare: {record.spare} was complete first")
            case Release():
                self._released(record)
            case Consume():
                self._consumed(t, record)
            case Trained():
                for member in record.trajectories:
                    self._trained_on(t, record, member.id, member.min, member.max, member.tokens)
            case End(reason=reason):
                self.finished = reason

    def _void(self, step: int) -> None:
        for group in self.groups.values():
            if group.step is None or group.step < step or group.attempt == self.attempt:
                continue
            for one in group.trajectories:
                if one.fate != "void":
                    text = f"its training is void: attempt {self.attempt} resumed at step {step}, before it"
                    one.add(one.events[-1][0], text)
                    one.fate = "void"

    def _released(self, record: Release) -> None:
        step = self.steps.get((self.attempt, self.next_step))
        if step is not None and step.batch_at is None:
            step.released[record.reason] += 1
        if self._only_alive:
            self.groups.pop(record.group, None)

    def _occupied(self, t: float, group: GroupHistory) -> None:
        group.occupied_at = t
        last = group.last_rewarded
        for one in self._alive_of(group.group_id):
            whose = "its own" if one is last else f"that of {last.trajectory_id}"
            one.add(t, f"its group is complete; the last reward was {whose}")

    def _consumed(self, t: float, record: Consume) -> None:
        self.next_step = record.buffer + 1
        for taken in record.groups:
            group = self.groups.get(taken.group)
            if group is None:
                continue
            group.step, group.version = record.buffer, taken.version
            for one in self._alive_of(taken.group):
                text = f"handed to the trainer in the batch of step {record.buffer}"
                one.add(t, f"{text} (V = {taken.version}, η = {self.bound})")
                one.leave(t)
                one.fate = f"handed to the trainer in step {record.buffer}"

    def _trained_on(self, t: float, record: Trained, who: str, oldest: int, newest: int, tokens: int) -> None:
        one = self._alive.pop(who, None)
        if one is None:
            return
        if self._only_alive:
            self.groups.pop(one.group.group_id, None)
        if not tokens:
            one.fate = f"masked in step {record.step}"
            one.add(t, one.fate)
            return
        by = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        one.fate = f"trained in step {record.step} with staleness {record.version - oldest}"
        one.add(t, f"{one.fate} (η = {self.bound}): {tokens} tokens of {by}")

    # ------------------------------------------------------------------ groups

    def _alive_of(self, group: str) -> list[TrajectoryHistory]:
        members = self.groups[group].trajectories if group in self.groups else []
        return [one for one in members if one.trajectory_id in self._alive]

    def _tell(self, t: float, group: str, text: str) -> None:
        for one in self._alive_of(group):
            one.add(t, text)


def ledger_records(folder: Path) -> Iterator[tuple[int, int, Record]]:
    """Records of a run's ledger; none when it has no ledger yet."""
    path = folder / "ledger.jsonl"
    return read_ledger(path) if path.is_file() else iter(())
