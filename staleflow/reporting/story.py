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
from staleflow.reporting.lives import RELEASED, GroupLife, Life, StepLife
from staleflow.storage.journal import Line, read_journal
from staleflow.storage.ledger import read_ledger

Wanted = Callable[[str, tuple[str, ...]], bool]


class Story:
    """What a run folder tells of the groups that are wanted, and of its steps."""

    def __init__(self, folder: Path, wanted: Wanted, *, only_alive: bool = False) -> None:
        """`wanted(group, members)` says which groups to follow; `only_alive` forgets them when they are over.

        Raises RunFolderError without a journal.
        """
        self.groups: dict[str, GroupLife] = {}
        self.steps: dict[tuple[int, int], StepLife] = {}
        """By attempt and step."""
        self.bound = 0
        self.batch_size = 0
        self.next_step = 0
        self.attempt = 0
        self.end = 0.0
        """Time of the newest line, in the newest attempt."""
        self.finished = ""
        self.versions: dict[str, int] = {}
        """Loaded version by instance."""
        self._wanted = wanted
        self._forget = only_alive
        self._lives: dict[str, Life] = {}
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

    # ------------------------------------------------------------------ attempts and instances

    def _on_begin(self, t: float, line: Line) -> None:
        if self.end or self.groups:
            self._catch_up(self.end, None, before_attempt=line["a"])
            for life in self._lives.values():
                life.leave(self.end)
                life.fate = "void"
                life.tell(self.end, f"attempt {self.attempt} was over; attempt {line['a']} began with step "
                                    f"{line['step']}, and its prompt is drawn anew")  # fmt: skip
            self._lives.clear()
        self.attempt, self.end, self.finished = line["a"], t, ""
        self.versions.clear()

    def _on_join(self, t: float, line: Line) -> None:
        self.versions[line["i"]] = line["v"]

    def _on_lost(self, t: float, line: Line) -> None:
        lengths = dict(line["back"])
        for life in self._resident(line["i"]):
            length = lengths.get(life.trajectory_id)
            kept = f" with {length} tokens" if length is not None else ""
            life.tell(t, f"{line['i']} was lost ({line.get('why', '')}): back in the trajectory server{kept}")
            life.enter(t, "pending")
        self.versions.pop(line["i"], None)

    def _on_report(self, t: float, line: Line) -> None:
        instance, version, acked = line["i"], line["v"], line["q"]
        pulled = version != self.versions.get(instance)
        self.versions[instance] = version
        for life in self._resident(instance):
            if not life.arrived and life.route_seq <= acked:
                life.arrived = True
                life.tell(t, f"{instance} has taken it in, at version {version}")
            elif pulled and life.arrived:
                seconds = f" in {line['s']:.2f} s" if "s" in line else ""
                life.tell(t, f"{instance} pulled version {version}{seconds}; it goes on there")
            if life.ordered_out and life.ordered_out <= acked:
                life.tell(t, f"{instance} did not have it any more: back in the trajectory server")
                life.enter(t, "pending")

    def _resident(self, instance: str) -> Iterator[Life]:
        for life in self._lives.values():
            if life.now.state == "running" and life.now.instance == instance and life.now.until is None:
                yield life

    # ------------------------------------------------------------------ trajectories

    def _on_draw(self, t: float, line: Line) -> None:
        if not self._wanted(line["g"], tuple(line["m"])):
            return
        group = GroupLife(group_id=line["g"], attempt=self.attempt, drawn_at=t)
        self.groups[line["g"]] = group
        for trajectory_id in line["m"]:
            life = self._lives[trajectory_id] = Life(trajectory_id=trajectory_id, group=group)
            group.members[trajectory_id] = life
            life.tell(t, f"drawn, a prompt of {line['l']} tokens, with a group of {len(line['m'])}")
            life.enter(t, "pending")

    def _on_route(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is None:
            return
        instance, why = line["i"], f" ({line['why']})" if "why" in line else ""
        waited = t - life.now.since
        text = f"sent to {instance} at {line['l']} tokens, after {waited:.2f} s in the trajectory server{why}"
        text += self._admission(life, line)
        life.tell(t, text)
        life.enter(t, "running", instance)
        life.route_seq, life.arrived, life.ordered_out = line["q"], False, 0

    def _admission(self, life: Life, line: Line) -> str:
        """What the route did for its group's reservation; of a first route, what it found."""
        version = life.group.version
        if line.get("ad") == "reserve":
            spare = " as a spare" if "sp" in line else ""
            return f"; reserves its group at V = {line['av']}{spare}, for {self._window(line['av'])}"
        if line.get("ad") == "lower":
            return f"; lowers its group to V = {line['av']}, for {self._window(line['av'])}"
        if life.route_seq == 0 and version is not None:
            return f"; its group is reserved at V = {version}, for {self._window(version)}"
        return ""

    def _window(self, version: int) -> str:
        """The steps that may still train a group of this version."""
        first, last = self.next_step, version + self.bound
        return f"step {last}" if first == last else f"a step from {first} to {last}"

    def _on_interrupt(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.ordered_out = line["q"]
            life.tell(t, f"to be interrupted on {line['i']}: {line.get('why', 'no reason given')}")

    def _on_abort(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"aborted on {line['i']}: {line.get('why', 'no reason given')}")
            life.leave(t)

    def _on_reject(self, t: float, line: Line) -> None:
        life = self._lives.get(line.get("id", ""))
        if life is not None and life.now.instance == line["i"] and life.route_seq == line["q"]:
            life.tell(t, f"{line['i']} refused it: {line.get('why', '')}; back in the trajectory server")
            life.enter(t, "pending")

    def _on_back(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None and life.now.instance == line["i"]:
            text = f"back in the trajectory server with {line['l']} tokens{_runs(line)}"
            life.tell(t, text)
            life.enter(t, "pending")

    def _on_done(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None and life.now.instance == line["i"]:
            life.tell(
                t, f"finished on {line['i']} at {line['l']} tokens ({line.get('end', '')}){_runs(line)}"
            )
            life.enter(t, "scoring")

    def _on_external(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"waits for its environment, {line['s']:g} s at most")
            life.enter(t, "external")

    def _on_given(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"its environment answered: goes on at {line['l']} tokens")
            life.enter(t, "pending")

    def _on_gave_up(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"given up, and masked in training: {line.get('why', '')}")
            life.enter(t, "scoring")

    def _on_score(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            status = "" if line["st"] == "ok" else f" ({line['st']})"
            life.tell(t, f"scored {line['raw']:g}{status}, {t - life.now.since:.2f} s after it had finished")
            life.enter(t, "rewarded")

    def _on_cut(self, t: float, line: Line) -> None:
        life = self._lives.get(line["id"])
        if life is not None:
            life.tell(t, f"cut off where it is: {line.get('why', 'no reason given')}")
            life.enter(t, "scoring")

    def _on_resample(self, t: float, line: Line) -> None:
        life = self._lives.pop(line["id"], None)
        if life is None:
            return
        life.leave(t)
        life.fate = f"dropped for {line['to']}"
        life.tell(t, f"{life.fate}, the same prompt sampled anew: {line.get('why', 'no reason given')}")
        anew = self._lives[line["to"]] = Life(trajectory_id=line["to"], group=life.group)
        life.group.members[line["to"]] = anew
        anew.tell(t, f"takes the place of {line['id']} in its group, from the prompt on")
        anew.enter(t, "pending")

    def _on_release(self, t: float, line: Line) -> None:
        for trajectory_id in line["ids"]:
            life = self._lives.pop(trajectory_id, None)
            if life is not None:
                life.leave(t)
                why = line.get("why", "")
                life.fate = f"released: {why}"
                life.tell(t, f"released: {RELEASED.get(why, why)}")

    # ------------------------------------------------------------------ steps

    def _step(self, step: int) -> StepLife:
        return self.steps.setdefault((self.attempt, step), StepLife(attempt=self.attempt, step=step))

    def _on_push(self, t: float, line: Line) -> None:
        self._step(line["v"]).idle_since = t

    def _on_batch(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.batch_at = t
        step.idle_since = t - line["s"]  # as the loop measured it

    def _on_trained(self, t: float, line: Line) -> None:
        step = self._step(line["step"])
        step.trained_at, step.update_s, step.push_s = t, line["u"], line["p"]

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
                self.groups[record.group].occupied_at = t
                last = max(self.groups[record.group].lives, key=lambda m: m.now.since)
                for life in self._alive(record.group):
                    whose = "its own" if life is last else f"that of {last.trajectory_id}"
                    life.tell(t, f"its group is complete, the last reward {whose}")
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
                life.leave(t)
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

    def _alive(self, group: str) -> list[Life]:
        lives = self.groups[group].lives if group in self.groups else []
        return [life for life in lives if life.trajectory_id in self._lives]

    def _tell_group(self, t: float, group: str, text: str) -> None:
        for life in self._alive(group):
            life.tell(t, text)


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


def _runs(line: Line) -> str:
    """`: 12 by version 3, 4 given, 20 by version 4` of a line that has it."""
    if not line.get("runs"):
        return ""
    parts = [f"{n} given" if version < 0 else f"{n} by version {version}" for version, n in line["runs"]]
    return f": {', '.join(parts)}"
