"""The open entries of the staleness buffer, replayed from the ledger by independent rules.

Checks at every transition that it is legal and that the firm entries fit: at most (bound + 1) * batch_size,
and for each deadline d = V + bound no more entries with deadlines up to d than d - next_buffer + 1 batches
hold. After a violation the replay follows the ledger, so that one fault is reported once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from staleflow.audit.lines import Fields
from staleflow.audit.report import Findings


@dataclass(slots=True, kw_only=True)
class OpenEntry:
    """One group in the buffer."""

    version: int
    spare: bool
    order: int
    """Line of its reservation."""
    occupied: bool = False


_UNKNOWN = ("unknown", "was never reserved")


class OpenEntries:
    """All groups reserved and neither released nor consumed."""

    def __init__(self, findings: Findings, start: Fields) -> None:
        self.next_buffer = 0
        self._findings = findings
        self._bound: int = start["bound"]
        self._batch_size: int = start["batch_size"]
        self._spare_limit: int = start["spare_limit"]
        self._drop_last: bool = start["last_batch"] == "drop"
        self._entries: dict[str, OpenEntry] = {}
        self._fate: dict[str, tuple[str, str]] = {}
        """Group no longer open -> its fate: `consumed`, `released`, `expired` or `void`, and a phrase for
        messages."""
        self._expired: set[str] = set()
        """Spares past their deadline, without a release record so far."""
        self._firm: Counter[int] = Counter()
        """Firm entries by deadline."""
        self._fits = True
        self._final_line: int | None = None
        self.released: Counter[str] = Counter()

    # One method per kind of record -----------------------------------------------------------------------

    def reserve(self, fields: Fields) -> None:
        """A group enters."""
        group, version = fields["group"], fields["version"]
        if group in self._entries:
            self._say("reserve_twice", f"group {group} is reserved though it is already open", group)
            return
        if group in self._fate:
            self._say(
                "group_reused", f"group {group} is reserved again though it {self._fate[group][1]}", group
            )
        if self._final_line:
            self._say(
                "reserve_after_final",
                f"group {group} is reserved after the final batch of line {self._final_line}",
                group,
            )
        if not 0 <= version <= self.next_buffer:
            self._say(
                "version_ahead",
                f"group {group} is reserved at version {version}, which does not exist yet at buffer "
                f"{self.next_buffer}",
                group,
            )
        entry = OpenEntry(version=version, spare=fields["spare"], order=self._findings.line or 0)
        self._entries[group] = entry
        self._check_age(group, entry)
        if not entry.spare:
            self._count(entry, 1)
            self._check_fit(f"reserving group {group} at version {version}", group)
        elif sum(e.spare for e in self._entries.values()) > self._spare_limit:
            self._say("spare_limit", f"group {group} exceeds the limit of {self._spare_limit} spares", group)

    def lower(self, fields: Fields) -> None:
        """V of a group falls."""
        group, version = fields["group"], fields["version"]
        entry = self._open(group, "lowered")
        if entry is None:
            return
        if entry.occupied:
            self._say("lower_occupied", f"group {group} is lowered though it is occupied", group)
        if version > entry.version:
            self._say(
                "version_raised", f"V of group {group} is raised from {entry.version} to {version}", group
            )
        if not entry.spare:
            self._count(entry, -1)
        entry.version = version
        self._check_age(group, entry)
        if not entry.spare:
            self._count(entry, 1)
            self._check_fit(f"lowering group {group} to version {version}", group)

    def occupy(self, fields: Fields) -> None:
        """A group is rewarded."""
        group = fields["group"]
        entry = self._open(group, "occupied")
        if entry is None:
            return
        if entry.occupied:
            self._say("occupy_twice", f"group {group} is occupied a second time", group)
        entry.occupied = True

    def release(self, fields: Fields) -> None:
        """A group leaves without being trained on."""
        group, reason = fields["group"], fields["reason"]
        if group in self._expired:
            self._expired.discard(group)
            self.released[reason] += 1
            return
        entry = self._open(group, "released")
        if entry is None:
            return
        if entry.occupied and not entry.spare:
            self._say(
                "release_occupied",
                f"group {group} is released ({reason}) though it is occupied and firm",
                group,
            )
        if reason == "expired" and not entry.spare:
            self._say("release_expired", f"firm group {group} is released for staleness", group)
        self.released[reason] += 1
        self._close(group, "released", f"was released on line {self._findings.line}")

    def promote(self, fields: Fields) -> None:
        """A spare becomes firm."""
        group = fields["group"]
        entry = self._open(group, "promoted")
        if entry is None:
            return
        if not entry.spare:
            self._say("promote_firm", f"group {group} is promoted though it is not a spare", group)
            return
        entry.spare = False
        self._count(entry, 1)
        self._check_fit(f"promoting group {group}", group)

    def swap(self, fields: Fields) -> None:
        """A finished spare and an unfinished firm entry swap places."""
        spare, firm = fields["spare"], fields["firm"]
        new, old = self._open(spare, "swapped in"), self._open(firm, "swapped out")
        if new is None or old is None:
            return
        if not new.spare or old.spare:
            self._say(
                "swap_kind", f"{spare} and {firm} are swapped, but are not a spare and a firm group", spare
            )
            return
        if not new.occupied:
            self._say(
                "swap_unfinished", f"spare group {spare} is swapped in though it is not occupied", spare
            )
        if old.occupied:
            self._say("swap_occupied", f"firm group {firm} is swapped out though it is occupied", firm)
        self._count(old, -1)
        new.spare, old.spare = False, True
        self._count(new, 1)
        self._check_fit(f"swapping group {spare} for {firm}", spare)

    def consume(self, fields: Fields) -> None:
        """A batch leaves."""
        buffer = self.next_buffer
        if fields["buffer"] != buffer:
            self._say(
                "buffer_order",
                f"buffer {fields['buffer']} is consumed instead of {buffer}",
                step=buffer,
            )
        before = len(self._findings.violations)
        self._check_batch(buffer, fields)
        for consumed in fields["groups"]:
            self._check_consumed(buffer, consumed)
        groups = [consumed["group"] for consumed in fields["groups"]]
        if len(self._findings.violations) == before:
            self._check_choice(buffer, list(dict.fromkeys(groups)))
        for group, times in Counter(groups).items():
            if times > 1:
                self._say(
                    "consumed_twice", f"group {group} occurs {times} times in step {buffer}", group, buffer
                )
            if group in self._entries:
                self._close(group, "consumed", f"was consumed in step {buffer}")
        if fields["final"]:
            self._final_line = self._findings.line
        self.next_buffer = buffer + 1
        for group, entry in list(self._entries.items()):
            if entry.spare and entry.version + self._bound < self.next_buffer:
                self._close(group, "expired", f"expired as a spare in step {buffer}")
                self._expired.add(group)
        self._check_fit(f"consuming buffer {buffer}", step=buffer)

    def resume(self, step: int) -> None:
        """Every open entry is void."""
        for group in list(self._entries):
            self._close(group, "void", f"was voided by the resume on line {self._findings.line}")
        self._expired.clear()
        self._final_line = None
        self._fits = True
        self.next_buffer = step

    # Checks ----------------------------------------------------------------------------------------------

    def _check_batch(self, buffer: int, fields: Fields) -> None:
        size, limit = len(fields["groups"]), self._batch_size
        if not fields["final"]:
            if size != limit:
                self._say("batch_size", f"buffer {buffer} has {size} groups, not {limit}", step=buffer)
            return
        waiting = next((group for group, entry in self._entries.items() if not entry.occupied), None)
        if waiting is not None:
            self._say(
                "final_unoccupied",
                f"buffer {buffer} is consumed as the final batch though group {waiting} is not occupied",
                waiting,
                buffer,
            )
        expected = min(limit, self._firm.total())
        if size != expected or not size or (size < limit and self._drop_last):
            self._say(
                "batch_size",
                f"the final buffer {buffer} has {size} groups, but {expected} of {limit} are left"
                + (" and a smaller last batch must be dropped" if self._drop_last else ""),
                step=buffer,
            )

    def _check_consumed(self, buffer: int, consumed: Fields) -> None:
        group, version = consumed["group"], consumed["version"]
        entry = self._entries.get(group)
        if entry is None:
            kind, fate = self._fate.get(group, _UNKNOWN)
            code = {"consumed": "consumed_twice", "released": "consume_released"}.get(kind, "consume_unknown")
            self._say(code, f"group {group} is consumed in step {buffer} though it {fate}", group, buffer)
            return
        if entry.spare:
            self._say("consume_spare", f"spare group {group} is consumed in step {buffer}", group, buffer)
        if not entry.occupied:
            self._say(
                "consume_unoccupied",
                f"group {group} is consumed in step {buffer} though it is not occupied",
                group,
                buffer,
            )
        if version != entry.version:
            self._say(
                "consume_version",
                f"group {group} is consumed in step {buffer} with version {version}, not {entry.version}",
                group,
                buffer,
            )
        if entry.version + self._bound < buffer:
            self._say(
                "consume_bound",
                f"group {group} of version {entry.version} is consumed in step {buffer}, "
                f"more than {self._bound} versions later",
                group,
                buffer,
            )

    def _check_choice(self, buffer: int, groups: list[str]) -> None:
        ready = [
            (e.version, e.order, group) for group, e in self._entries.items() if e.occupied and not e.spare
        ]
        expected = [group for _, _, group in sorted(ready)[: len(groups)]]
        for was, should in zip(groups, expected, strict=False):
            if was != should:
                self._say(
                    "consume_order",
                    f"step {buffer} takes group {was}, but {should} has the earlier deadline or reservation",
                    was,
                    buffer,
                )
                return

    def _check_age(self, group: str, entry: OpenEntry) -> None:
        if entry.version + self._bound < self.next_buffer:
            self._say(
                "too_old",
                f"group {group} of version {entry.version} is too old for buffer {self.next_buffer} "
                f"under bound {self._bound}",
                group,
            )
            if not entry.spare:
                self._fits = False

    def _check_fit(self, action: str, group: str | None = None, step: int | None = None) -> None:
        fitted, self._fits = self._fits, True
        total, room = 0, (self._bound + 1) * self._batch_size
        for deadline in sorted(self._firm):
            total += self._firm[deadline]
            if total > (deadline - self.next_buffer + 1) * self._batch_size or total > room:
                self._fits = False
        if self._fits or not fitted:
            return
        if total > room:
            self._say("over_capacity", f"{action} makes {total} firm groups, more than {room}", group, step)
        else:
            self._say(
                "not_placeable",
                f"{action} leaves firm groups that cannot all be trained on in time "
                f"(deadline: groups {dict(sorted(self._firm.items()))}, next buffer {self.next_buffer})",
                group,
                step,
            )

    # Bookkeeping -----------------------------------------------------------------------------------------

    def _open(self, group: str, action: str) -> OpenEntry | None:
        entry = self._entries.get(group)
        if entry is None:
            fate = self._fate.get(group, _UNKNOWN)[1]
            self._say("unknown_group", f"group {group} is {action} though it {fate}", group)
        return entry

    def _close(self, group: str, kind: str, fate: str) -> None:
        entry = self._entries.pop(group)
        if not entry.spare:
            self._count(entry, -1)
        self._fate[group] = (kind, fate)

    def _count(self, entry: OpenEntry, change: int) -> None:
        deadline = entry.version + self._bound
        self._firm[deadline] += change
        if not self._firm[deadline]:
            del self._firm[deadline]

    def _say(self, code: str, message: str, group: str | None = None, step: int | None = None) -> None:
        self._findings.add(code, message, group=group, step=step)
