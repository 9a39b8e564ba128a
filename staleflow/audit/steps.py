"""The training steps, replayed from the ledger.

For each step that no resume voided: the batch trained on is the batch consumed, id by id and hash by hash;
its weights have version = step; each trajectory has V_group <= min version <= max version <= step and
min version + bound >= step; steps are numbered from 0 without gaps; no trajectory and no use of a prompt (an
epoch and a prompt) occurs in two steps.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from staleflow.audit.lines import Fields
from staleflow.audit.report import Findings

_GROUP_ID = re.compile(r"(e\d+-p.+)-a\d+")
"""The part before the attempt identifies one use of one prompt; any other id is its own use."""


@dataclass(slots=True, kw_only=True)
class ConsumedMember:
    """One consumed trajectory."""

    group: str
    version: int
    """V of the group."""
    hash: str


@dataclass(slots=True, kw_only=True)
class Step:
    """One consumed batch, and its training record."""

    line: int
    groups: int = 0
    members: dict[str, ConsumedMember] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    """Uses of prompts."""
    trained: bool = False
    lags: Counter[int] = field(default_factory=Counter)
    """Staleness -> trajectories."""


class Steps:
    """All valid steps, by number."""

    def __init__(self, findings: Findings, start: Fields) -> None:
        self.voided = 0
        """Trained steps that a resume voided."""
        self.furthest = 0
        """One more than the highest step ever trained, including voided steps."""
        self._findings = findings
        self._bound: int = start["bound"]
        self._group_size: int = start["group_size"]
        self._steps: dict[int, Step] = {}
        self._next = 0
        """The step to be trained next."""
        self._step_of: dict[str, int] = {}
        """Consumed trajectory -> step."""
        self._use: dict[str, tuple[int, str]] = {}
        """Consumed use of a prompt -> (step, group)."""

    @property
    def trained(self) -> list[Step]:
        """The trained steps."""
        return [step for step in self._steps.values() if step.trained]

    # One method per kind of record -----------------------------------------------------------------------

    def consume(self, number: int, fields: Fields) -> None:
        """A batch goes to the trainer; `number` is the expected step."""
        step = Step(line=self._findings.line or 0, groups=len(fields["groups"]))
        for consumed in fields["groups"]:
            group, members = consumed["group"], consumed["trajectories"]
            if len(members) != self._group_size:
                self._say(
                    "group_size",
                    f"group {group} is consumed with {len(members)} trajectories, not {self._group_size}",
                    step=number,
                    group=group,
                )
            self._note_use(number, step, group)
            self._note_members(number, step, consumed)
        self._steps[number] = step

    def train(self, fields: Fields) -> None:
        """A step is done."""
        number = fields["step"]
        step = self._steps.get(number)
        if step is None:
            self._say(
                "trained_unconsumed", f"step {number} is trained though it was not consumed", step=number
            )
            self._next = max(self._next, number + 1)  # reported: no gap or missing record later
            return
        if step.trained:
            self._say("trained_twice", f"step {number} is trained a second time", step=number)
            return
        if number != self._next:
            self._say("step_gap", f"step {number} is trained instead of step {self._next}", step=number)
        if fields["version"] != number:
            self._say(
                "trained_version",
                f"step {number} is trained from weight version {fields['version']}",
                step=number,
            )
        self._check_agreement(number, step, fields["trajectories"])
        for trained in fields["trajectories"]:
            self._check_versions(number, step, trained)
        step.trained = True
        self._next = number + 1
        self.furthest = max(self.furthest, self._next)

    def resume(self, first: int) -> None:
        """Steps from `first` on are void."""
        if first > self._next:
            self._say(
                "resume_ahead",
                f"the run resumes at step {first} though only {self._next} steps are trained",
                step=first,
            )
        for number in [number for number in self._steps if number >= first]:
            step = self._steps.pop(number)
            self.voided += step.trained
            for trajectory in step.members:
                self._step_of.pop(trajectory, None)
            for use in step.uses:
                self._use.pop(use, None)
        self._next = first

    def end(self, fields: Fields) -> None:
        """The attempt ended by itself."""
        finish_reports = fields["reason"] != "interrupted" and fields["steps"] == len(self._steps)
        if fields["steps"] != self._next and not finish_reports:
            self._say(
                "end_steps", f"the run ends after {fields['steps']} steps though {self._next} are trained"
            )

    def finish(self, end_reason: str | None) -> str | None:
        """After the last line: each consumed step must be trained, except the last one of an interrupted run.

        Returns a description of unfinished work, or None.
        """
        cut_short = end_reason in (None, "interrupted")
        if end_reason is None and not self.furthest:
            self._say(
                "no_steps", "the ledger has no trained step and no end record, so there is nothing to check"
            )
        for number, step in self._steps.items():
            if step.trained or number < self._next:  # a gap has been reported
                continue
            if cut_short and number == max(self._steps):
                return f"step {number} was consumed but not trained"
            self._findings.line = step.line
            self._say("step_untrained", f"step {number} is consumed but has no trained record", step=number)
        return None

    # Checks ----------------------------------------------------------------------------------------------

    def _note_use(self, number: int, step: Step, group: str) -> None:
        match = _GROUP_ID.fullmatch(group)
        use = match.group(1) if match else group
        earlier = self._use.get(use)
        if earlier and earlier[1] != group:
            self._say(
                "prompt_twice",
                f"group {group} in step {number} repeats the prompt use {use} of "
                f"group {earlier[1]} in step {earlier[0]}",
                step=number,
                group=group,
            )
        if not earlier:
            self._use[use] = (number, group)
            step.uses.add(use)

    def _note_members(self, number: int, step: Step, consumed: Fields) -> None:
        group = consumed["group"]
        for trajectory, times in Counter(member["id"] for member in consumed["trajectories"]).items():
            earlier = self._step_of.get(trajectory)
            owner = group
            if earlier is not None:
                owner = (step if earlier == number else self._steps[earlier]).members[trajectory].group
            if times > 1 or owner != group:  # for a group consumed twice only the group is reported
                self._say(
                    "trajectory_twice",
                    f"trajectory {trajectory} is consumed twice: in step {number} with group {group} and "
                    f"in step {number if earlier is None else earlier} with group {owner}",
                    step=number,
                    group=group,
                    trajectory=trajectory,
                )
            self._step_of[trajectory] = number
        for member in consumed["trajectories"]:
            step.members[member["id"]] = ConsumedMember(
                group=group, version=consumed["version"], hash=member["hash"]
            )

    def _check_agreement(self, number: int, step: Step, trained: list[Fields]) -> None:
        times = Counter(member["id"] for member in trained)
        for trajectory, count in times.items():
            if count > 1:
                self._say(
                    "trajectory_trained_twice",
                    f"trajectory {trajectory} is trained on {count} times in step {number}",
                    step=number,
                    trajectory=trajectory,
                )
            if trajectory not in step.members:
                elsewhere = self._step_of.get(trajectory)
                where = "was never consumed" if elsewhere is None else f"was consumed for step {elsewhere}"
                self._say(
                    "trained_not_consumed",
                    f"trajectory {trajectory} is trained on in step {number} though it {where}",
                    step=number,
                    trajectory=trajectory,
                )
        for trajectory, member in step.members.items():
            if trajectory not in times:
                self._say(
                    "consumed_not_trained",
                    f"trajectory {trajectory} is consumed for step {number} but not trained on",
                    step=number,
                    group=member.group,
                    trajectory=trajectory,
                )

    def _check_versions(self, number: int, step: Step, trained: Fields) -> None:
        trajectory, oldest, newest = trained["id"], trained["min"], trained["max"]
        member = step.members.get(trajectory)
        group = member.group if member else None

        def say(code: str, message: str) -> None:
            self._say(
                code, f"trajectory {trajectory} {message}", step=number, group=group, trajectory=trajectory
            )

        if member and trained["hash"] != member.hash:
            say(
                "hash_mismatch",
                f"has hash {trained['hash']} in step {number} but was consumed as {member.hash}",
            )
        if oldest < 0 and trained["tokens"] == 0:
            return  # no generated tokens, so no version to check
        step.lags[number - oldest] += 1
        if oldest + self._bound < number:
            say(
                "staleness",
                f"has tokens of version {oldest} in step {number}, more than {self._bound} versions later",
            )
        elif oldest < 0 or oldest > newest:
            say("version_range", f"has token versions {oldest}..{newest} in step {number}")
        elif member and oldest < member.version:
            say(
                "below_group", f"has tokens of version {oldest}, older than V = {member.version} of its group"
            )
        if newest > number:
            say("version_future", f"has tokens of version {newest} in step {number}, which did not exist yet")

    def _say(
        self,
        code: str,
        message: str,
        *,
        step: int | None = None,
        group: str | None = None,
        trajectory: str | None = None,
    ) -> None:
        self._findings.add(code, message, step=step, group=group, trajectory=trajectory)
