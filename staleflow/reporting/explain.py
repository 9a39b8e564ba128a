"""`staleflow explain`: the history of a trajectory or a group, or why a training step waited, as text."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from staleflow.errors import UserError
from staleflow.protocol.records import Consume
from staleflow.reporting.history.lives import GroupHistory, Stay, StepHistory, TrajectoryHistory
from staleflow.reporting.history.moves import State, journal_lines
from staleflow.reporting.history.reader import History, ledger_records

SHOWN = 8
"""Groups listed of a step: the last ones to be complete."""
SHOWN_S = 0.005
"""Shorter times would read 0.00 s."""
AT_ONCE_S = 0.001
"""A shorter wait counts as none."""

DOING: dict[State, str] = {
    "pending": "waiting in the trajectory server",
    "running": "generating",
    "external": "waiting for its environment",
    "scoring": "being scored",
    "rewarded": "waiting for the rest of its batch",
}
"""What a trajectory does in each state."""


def explain(folder: Path, what: str) -> str:
    """Return the text about `what`: a trajectory id, a group id, or `step N` (`step=N`).

    Raises UserError when there is no such thing, naming the nearest, and RunFolderError without a journal.
    """
    words = what.replace("=", " ").split()
    if len(words) == 2 and words[0] == "step":
        if not words[1].isdecimal():
            raise UserError(f"a training step is a number from 0 on, not {words[1]!r}")
        return _explain_step(folder, int(words[1]))
    history = History(folder, lambda group, members: what == group or what in members)
    if not history.groups:
        first = _drawn_first(folder, what)
        history = History(folder, lambda group, members: first in members)
    (group,) = history.groups.values()
    if what == group.group_id:
        return _explain_group(history, group)
    return _explain_trajectory(history, group.members[what])


# ---------------------------------------------------------------------- trajectories and groups


def _explain_trajectory(history: History, one: TrajectoryHistory) -> str:
    head = f"trajectory {one.trajectory_id} of group {one.group.group_id}{_attempt(', ', one.group.attempt)}"
    events = [_line(time, text) for time, text in one.events]
    return "\n".join([head, *events, f"summary: {_summary(history, one)}"])


def _explain_group(history: History, group: GroupHistory) -> str:
    version = f", V = {group.version}" if group.version is not None else ", never reserved"
    members = _many(len(group.members), "trajectory")
    lines = [f"group {group.group_id}{_attempt(', ', group.attempt)}: {members}{version}"]
    times = {"drawn": group.drawn_at, "reserved": group.reserved_at, "complete": group.occupied_at}
    lines += [_line(time, text) for text, time in times.items() if time is not None]
    lines += [f"  {one.trajectory_id}: {_summary(history, one)}" for one in group.trajectories]
    return "\n".join(lines)


def _summary(history: History, one: TrajectoryHistory) -> str:
    spent = dict.fromkeys(DOING, 0.0)
    instances: dict[str, None] = {}
    end = max(history.end, one.now.until or 0.0)  # times of an earlier attempt may lie beyond this one's
    for stay, seconds in one.between(0.0, end):
        spent[stay.state] += seconds
        if stay.instance:
            instances[stay.instance] = None
    parts = []
    for state, doing in DOING.items():
        if spent[state] >= SHOWN_S:
            on = f" on {', '.join(instances)}" if state == "running" else ""
            parts.append(f"{spent[state]:.2f} s {doing}{on}")
    return "; ".join([one.fate or f"still {DOING[one.now.state]}", *parts])


# ---------------------------------------------------------------------- steps


def _explain_step(folder: Path, number: int) -> str:
    batches = {
        record.buffer: record for _, _, record in ledger_records(folder) if isinstance(record, Consume)
    }
    if number in batches:
        ids = {group.group for group in batches[number].groups}
        history = History(folder, lambda group, _: group in ids)
        attempts = [attempt for attempt, step in history.steps if step == number]
        step = history.steps.get((max(attempts, default=-1), number))
        if step is not None and step.batch_at is not None:
            return _explain_batch(history, step, step.batch_at, batches[number])
    history = History(folder, lambda *_: True, only_alive=True)
    step = history.steps.get((history.attempt, number))
    if number == history.next_step and step is not None and step.batch_at is None and not history.finished:
        return _explain_missing(history, step)
    last = f"the last step was {max(batches)}" if batches else "no step has started"
    raise UserError(f"step {number} was not handed to the trainer in {folder}: {last}")


def _explain_batch(history: History, step: StepHistory, batch_at: float, batch: Consume) -> str:
    idle = step.idle_since if step.idle_since is not None else batch_at
    waited = batch_at - idle
    groups = [history.groups[g.group] for g in batch.groups if g.group in history.groups]
    late = sorted((g for g in groups if g.completed_at > idle + AT_ONCE_S), key=lambda g: g.completed_at)
    members = _many(sum(len(group.ids) for group in batch.groups), "trajectory")
    lines = [
        f"step {step.step}{_attempt(' of ', step.attempt)}: {_many(len(groups), 'group')}, {members}",
        _line(idle, f"the trainer has weights {step.step} and is idle; "
                    f"{len(groups) - len(late)} of {len(groups)} groups are complete"),
    ]  # fmt: skip
    if len(late) > SHOWN:
        lines.append(f"{'':>14}({_many(len(late) - SHOWN, 'group')} complete before those below)")
    lines += [_late_group(group, idle) for group in late[-SHOWN:]]
    lines.append(_line(batch_at, f"the batch is handed out: the trainer waited {waited:.2f} s"))
    if step.trained_at is not None:
        lines.append(
            _line(step.trained_at, f"trained: {step.update_s:.2f} s update, {step.push_s:.2f} s push")
        )
    lines.append(f"verdict: step {step.step} {_verdict(step, waited, late, idle)}.")
    return "\n".join(lines)


def _late_group(group: GroupHistory, idle: float) -> str:
    """A group that the trainer waited for: its last trajectory, and what this did meanwhile."""
    last = group.last_rewarded
    stays = last.between(idle, group.completed_at)
    doing = ", ".join(_spent(stay, seconds, idle) for stay, seconds in stays if seconds >= SHOWN_S)
    text = f"group {group.group_id} (V = {group.version}) is complete, last with {last.trajectory_id}"
    return _line(group.completed_at, f"{text}; since the trainer was idle: {doing or 'no time'}")


def _verdict(step: StepHistory, waited: float, late: list[GroupHistory], idle: float) -> str:
    if waited < AT_ONCE_S:
        return "did not wait: its batch was complete before the trainer was idle"
    text = f"waited {waited:.2f} s"
    filtered = step.released.get("filtered", 0)
    replaced = f"; {_many(filtered, 'group')} filtered meanwhile and replaced" if filtered else ""
    if not late:
        return f"{text} although its groups were complete: another group due by this step was not{replaced}"
    group = late[-1]
    last = group.last_rewarded
    stay, seconds = max(
        last.between(idle, group.completed_at), key=lambda s: s[1], default=(last.stays[0], 0.0)
    )
    began = last.stays[0].since > idle + AT_ONCE_S or (group.reserved_at or 0.0) > idle + AT_ONCE_S
    only_then = ", which could start only when the trainer was idle" if began else ""
    return f"{text}, last for {last.trajectory_id}{only_then}: {_spent(stay, seconds, idle)}{replaced}"


def _explain_missing(history: History, step: StepHistory) -> str:
    """A step that the trainer still waits for at the end of the journal."""
    assert step.idle_since is not None
    groups = sorted(
        (g for g in history.groups.values() if g.step is None),
        key=lambda g: (g.version is None, g.version or 0),
    )
    missing = [g for g in groups if g.occupied_at is None]
    lines = [
        f"step {step.step} has not been handed out: the trainer has been idle for "
        f"{history.end - step.idle_since:.2f} s",
        f"  {_many(len(groups) - len(missing), 'group')} complete of the {history.batch_size} in a batch",
    ]
    for group in missing[:SHOWN]:
        states = ", ".join(f"{one.trajectory_id} {_doing(one.now)} for {history.end - one.now.since:.2f} s"
                           for one in group.unfinished)  # fmt: skip
        version = f"V = {group.version}" if group.version is not None else "not reserved"
        lines.append(f"  group {group.group_id} ({version}): {states or 'all scored'}")
    if len(missing) > SHOWN:
        lines.append(f"  and {_many(len(missing) - SHOWN, 'group')} more")
    counts = Counter(_doing(one.now) for group in missing for one in group.unfinished)
    waits_for = "no trajectory is under way"
    if counts:
        doing, count = counts.most_common(1)[0]
        waits_for = f"{_many(counts.total(), 'trajectory')} missing, {count} of them {doing}"
    return "\n".join([*lines, f"verdict: step {step.step} waits: {waits_for}."])


def _spent(stay: Stay, seconds: float, idle: float) -> str:
    since = f" (since {stay.since:.2f} s)" if stay.since < idle - AT_ONCE_S else ""
    return f"{seconds:.2f} s {_doing(stay)}{since}"


def _doing(stay: Stay) -> str:
    return f"{DOING[stay.state]} on {stay.instance}" if stay.instance else DOING[stay.state]


# ---------------------------------------------------------------------- words


def _attempt(before: str, attempt: int) -> str:
    return f"{before}attempt {attempt}" if attempt else ""


def _many(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def _line(time: float, text: str) -> str:
    return f"{time:>10.2f} s  {text}"


def _drawn_first(folder: Path, what: str) -> str:
    """The trajectory that its group was drawn with and whose place `what` took, directly or not.

    Raises UserError where there is no `what`, naming the nearest ids.
    """
    ids: dict[str, None] = {}
    replaced: dict[str, str] = {}
    for line in journal_lines(folder):
        if line["k"] == "draw":
            ids |= dict.fromkeys([line["g"], *line["m"]])
        elif line["k"] == "resample":
            replaced[line["to"]] = line["id"]
    if what in replaced:
        while what in replaced:
            what = replaced[what]
        return what
    if not ids:
        raise UserError(f"no trajectory was drawn in {folder}, so there is none called {what!r}")
    raise UserError(
        f"there is no trajectory or group {what!r} in {folder}: give an id such as "
        f'{", ".join(_nearest(what, ids))}, or "step N" for a training step'
    )


def _nearest(what: str, ids: Iterable[str]) -> list[str]:
    """Three ids most like it; of very many only those are compared that begin most like it."""
    ranked = sorted(ids, key=lambda i: _common(i, what), reverse=True)[:500]
    return difflib.get_close_matches(what, ranked, n=3, cutoff=0.5) or ranked[:3]


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
