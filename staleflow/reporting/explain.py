"""`staleflow explain`: the life of a trajectory, or why a training step waited, in plain lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from staleflow.errors import UserError
from staleflow.protocol.records import Consume
from staleflow.reporting.lives import GroupLife, Life, State, Stay, StepLife
from staleflow.reporting.story import Story, journal_of, records_of

SHOWN = 8
"""Groups listed of a step, those that came last."""
SHOWN_S = 0.005
"""Less would read 0.00 s."""
AT_ONCE_S = 0.001
"""A wait shorter than this is none."""

WHILE: dict[State, str] = {
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
    drawn_as = _drawn_as(folder, what)
    story = Story(folder, lambda group, members: what == group or drawn_as in members)
    for group in story.groups.values():
        if what == group.group_id:
            return _explain_group(story, group)
        return _explain_trajectory(story, group, group.members[what])
    raise UserError(_unknown(folder, what))


# ---------------------------------------------------------------------- trajectories and groups


def _explain_trajectory(story: Story, group: GroupLife, life: Life) -> str:
    attempt = f", attempt {group.attempt}" if group.attempt else ""
    head = f"trajectory {life.trajectory_id} of group {group.group_id}{attempt}"
    return "\n".join([head, *_events(life), f"in short: {_in_short(story, life)}"])


def _explain_group(story: Story, group: GroupLife) -> str:
    version = f", V = {group.version}" if group.version is not None else ", never reserved"
    attempt = f", attempt {group.attempt}" if group.attempt else ""
    lines = [f"group {group.group_id}{attempt}: {_many(len(group.members), 'trajectory')}{version}"]
    for time, text in (
        (group.drawn_at, "drawn"),
        (group.reserved_at, "reserved"),
        (group.occupied_at, "complete"),
    ):
        if time is not None:
            lines.append(_line(time, text))
    lines += [f"  {life.trajectory_id}: {_in_short(story, life)}" for life in group.lives]
    return "\n".join(lines)


def _events(life: Life) -> list[str]:
    return [_line(time, text) for time, text in life.events]


def _in_short(story: Story, life: Life) -> str:
    spent: dict[State, float] = {}
    where: dict[str, None] = {}
    end = max(story.end, life.now.until or 0.0)  # times of an earlier attempt may lie beyond this one's
    for stay, seconds in life.between(0.0, end):
        spent[stay.state] = spent.get(stay.state, 0.0) + seconds
        if stay.instance:
            where[stay.instance] = None
    parts = []
    for state, doing in WHILE.items():
        if spent.get(state, 0.0) >= SHOWN_S:
            on = f" on {', '.join(where)}" if state == "running" else ""
            parts.append(f"{spent[state]:.2f} s {doing}{on}")
    return "; ".join([life.fate or f"still {WHILE[life.now.state]}", *parts])


# ---------------------------------------------------------------------- steps


def _explain_step(folder: Path, number: int) -> str:
    batches = {record.buffer: record for _, _, record in records_of(folder) if isinstance(record, Consume)}
    if number in batches:
        ids = {group.group for group in batches[number].groups}
        story = Story(folder, lambda group, _: group in ids)
        attempts = [attempt for attempt, step in story.steps if step == number]
        step = story.steps.get((max(attempts, default=-1), number))
        if step is not None and step.batch_at is not None:
            return _explain_batch(story, step, batches[number])
    story = Story(folder, lambda *_: True, only_alive=True)
    step = story.steps.get((story.attempt, number))
    if number == story.next_step and step is not None and step.batch_at is None and not story.finished:
        return _explain_missing(story, step)
    there = f"the last one was step {max(batches)}" if batches else "no step was yet"
    raise UserError(f"step {number} was not handed to the trainer in {folder}: {there}")


def _explain_batch(story: Story, step: StepLife, batch: Consume) -> str:
    assert step.batch_at is not None
    idle = step.idle_since if step.idle_since is not None else step.batch_at
    waited = step.batch_at - idle
    groups = [story.groups[g.group] for g in batch.groups if g.group in story.groups]
    late = sorted((g for g in groups if _completed(g) > idle + AT_ONCE_S), key=_completed)
    attempt = f" of attempt {step.attempt}" if step.attempt else ""
    members = sum(len(group.ids) for group in batch.groups)
    lines = [
        f"step {step.step}{attempt}: {_many(len(groups), 'group')}, {_many(members, 'trajectory')}",
        _line(idle, f"the trainer has weights {step.step} and is idle; "
                    f"{len(groups) - len(late)} of {len(groups)} groups are complete"),
    ]  # fmt: skip
    if len(late) > SHOWN:
        lines.append(f"{'':>14}({_many(len(late) - SHOWN, 'group')} complete before those below)")
    for group in late[-SHOWN:]:
        lines += _late(group, idle)
    lines.append(_line(step.batch_at, f"the batch is handed out: the trainer has waited {waited:.2f} s"))
    if step.trained_at is not None:
        lines.append(
            _line(step.trained_at, f"trained: {step.update_s:.2f} s update, {step.push_s:.2f} s push")
        )
    lines.append(_verdict(step, waited, late, idle))
    return "\n".join(lines)


def _late(group: GroupLife, idle: float) -> list[str]:
    """A group that the trainer waited for: its last trajectory, and what this did meanwhile."""
    last, done = group.last_rewarded, _completed(group)
    stays = last.between(idle, done)
    doing = ", ".join(_spent(stay, seconds, idle) for stay, seconds in stays if seconds >= SHOWN_S)
    what = f"group {group.group_id} (V = {group.version}) is complete with {last.trajectory_id}"
    return [_line(done, f"{what}: {doing or 'no time'} since the trainer was idle")]


def _verdict(step: StepLife, waited: float, late: list[GroupLife], idle: float) -> str:
    filtered = step.released.get("filtered", 0)
    fresh = (
        f"; {_many(filtered, 'group')} filtered meanwhile, and others generated for them" if filtered else ""
    )
    if waited < AT_ONCE_S:
        return f"verdict: step {step.step} did not wait: its batch was complete before the trainer was idle."
    if not late:
        return (
            f"verdict: step {step.step} waited {waited:.2f} s although its groups were complete: "
            f"groups that must be trained no later were not{fresh}."
        )
    last = late[-1].last_rewarded
    stays = last.between(idle, _completed(late[-1]))
    stay, seconds = max(stays, key=lambda s: s[1], default=(last.stays[0], 0.0))
    began = last.stays[0].since > idle + AT_ONCE_S or (late[-1].reserved_at or 0.0) > idle + AT_ONCE_S
    why = ", which could begin only once the trainer was idle" if began else ""
    return (
        f"verdict: step {step.step} waited {waited:.2f} s, to the end for {last.trajectory_id}{why}: "
        f"{_spent(stay, seconds, idle)}{fresh}."
    )


def _explain_missing(story: Story, step: StepLife) -> str:
    """A step that the trainer still waits for at the end of the journal."""
    assert step.idle_since is not None
    groups = sorted(
        (g for g in story.groups.values() if g.step is None),
        key=lambda g: (g.version is None, g.version or 0),
    )
    complete = sum(g.occupied_at is not None for g in groups)
    waited = story.end - step.idle_since
    lines = [
        f"step {step.step} has not been handed out: the trainer has been idle for {waited:.2f} s",
        f"  {_many(complete, 'group')} complete, {story.batch_size} make a batch",
    ]
    missing = [g for g in groups if g.occupied_at is None]
    for group in missing[:SHOWN]:
        states = ", ".join(f"{life.trajectory_id} {_doing(life.now.state, life.now.instance)} for "
                           f"{story.end - life.now.since:.2f} s" for life in group.unfinished)  # fmt: skip
        version = f"V = {group.version}" if group.version is not None else "not reserved"
        lines.append(f"  group {group.group_id} ({version}): {states or 'all scored'}")
    if len(missing) > SHOWN:
        lines.append(f"  and {_many(len(missing) - SHOWN, 'group')} more")
    counts: dict[str, int] = {}
    for group in missing:
        for life in group.unfinished:
            doing = _doing(life.now.state, life.now.instance)
            counts[doing] = counts.get(doing, 0) + 1
    most = max(counts, key=lambda doing: counts[doing], default="")
    how_many = _many(sum(counts.values()), "trajectory")
    held = f"{how_many} missing, {counts[most]} of them {most}" if most else "nothing is under way"
    return "\n".join([*lines, f"verdict: step {step.step} waits: {held}."])


def _completed(group: GroupLife) -> float:
    return group.occupied_at if group.occupied_at is not None else group.drawn_at


def _spent(stay: Stay, seconds: float, idle: float) -> str:
    since = f" (since {stay.since:.2f} s)" if stay.since < idle - AT_ONCE_S else ""
    return f"{seconds:.2f} s {_doing(stay.state, stay.instance)}{since}"


def _doing(state: State, instance: str) -> str:
    return f"{WHILE[state]} on {instance}" if instance else WHILE[state]


# ---------------------------------------------------------------------- words


def _many(count: int, what: str) -> str:
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def _line(time: float, text: str) -> str:
    return f"{time:>10.2f} s  {text}"


def _drawn_as(folder: Path, trajectory_id: str) -> str:
    """The trajectory that this one was sampled anew for, and so on: one that its group was drawn with."""
    came_from = {line["to"]: line["id"] for line in journal_of(folder) if line["k"] == "resample"}
    while trajectory_id in came_from:
        trajectory_id = came_from[trajectory_id]
    return trajectory_id


def _unknown(folder: Path, what: str) -> str:
    ids: dict[str, None] = {}
    for line in journal_of(folder):
        if line["k"] == "draw":
            ids[line["g"]] = None
            ids.update(dict.fromkeys(line["m"]))
    if not ids:
        return f"no trajectory was drawn in {folder}, so there is none called {what!r}"
    close = ", ".join(_nearest(what, ids))
    return (
        f"there is no trajectory or group {what!r} in {folder}: give an id such as {close}, "
        'or "step N" for a training step'
    )


def _nearest(what: str, ids: Iterable[str]) -> list[str]:
    """Three ids most like it; of very many only those are compared that begin most like it."""
    ranked = sorted(ids, key=lambda i: _common(i, what), reverse=True)[:500]
    return difflib.get_close_matches(what, ranked, n=3, cutoff=0.5) or ranked[:3]


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
