"""From rewarded trajectories to training batches: completion, filter, occupy, consume, and the run's end.

Invariants: a batch is handed out only when the trainer has its step's weights, whose push may still be under
way, and consume is legal; only groups that are complete and passed the filter are occupied; groups are drawn
only as far as the buffer can place them under the newest version, as firm groups or spares, and no firm group
beyond the last step.

Redundancy. *Members*: a group may have more members than the `group_size` that are kept. It is complete as
soon as `group_size` usable members are rewarded, or all members are. Usable members are kept first, then
unusable ones (masked: a failed member never takes the place of one that may still arrive, and never counts as
a zero), each in the order of their rewards; the others are aborted at once. *Groups*: a spare is promoted as
soon as a firm place is free, earliest reserved first, before a new group takes the place. A finished spare
replaces an unfinished firm group if that lets an idle trainer continue (`stragglers.py`). Otherwise it
expires when its deadline is past, or when no remaining step needs it. The prompt of an expired group is
unused: it is drawn again before any other, and its new group is never swapped out, so a prompt is not dropped
repeatedly for being long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from staleflow.coordination.actions import Discard, DrawGroups, Finish, Outbox, Train
from staleflow.coordination.events import Rewarded
from staleflow.coordination.stragglers import (
    UNFINISHED,
    Left,
    StragglerRule,
    plan_swaps,
    stragglers,
    waited_for,
)
from staleflow.coordination.trajectory_table import Group, Member, TrajectoryTable
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    End,
    EndReason,
    LastBatch,
    Occupy,
    Promote,
    Release,
    Swap,
)

GroupFilter = Callable[[Sequence[float]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The part of the config that forming batches needs."""

    steps: int
    """Training steps of the whole run, including those before a resume."""
    group_size: int
    """Trajectories kept of each group."""
    last_batch: LastBatch = "train"
    max_filtered_batches: int = 20
    """The run ends after this many batches' worth of groups were released in a row."""


class Batches:
    """Groups on their way to the trainer."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        trajectories: TrajectoryTable,
        outbox: Outbox,
        settings: BatchSettings,
        group_filter: GroupFilter | None,
        abort: Callable[[Member, str], None],
    ) -> None:
        self.newest_version = -1
        self._trained_version = -1
        self.finished: EndReason | None = None
        self.exhausted = False
        self.stopping = False
        self._buffer = buffer
        self._trajectories = trajectories
        self._outbox = outbox
        self._settings = settings
        self._filter = group_filter
        self._abort = abort
        self._drawing = False
        self._released_in_a_row = 0
        self._may_swap = False
        """Something changed since the last check for swaps that may make one useful."""

    @property
    def trainer_idle(self) -> bool:
        """Whether the trainer has the weights of the next step and waits for its batch."""
        return self._trained_version == self._buffer.next_buffer

    @property
    def steps_left(self) -> int:
        """Batches that may still be consumed."""
        return max(0, self._settings.steps - self._buffer.next_buffer)

    @property
    def reservable(self) -> int:
        """Firm groups that may still be reserved before the run's last step."""
        if self.stopping or self.finished is not None:
            return 0
        return max(0, self.steps_left * self._buffer.batch_size - self._buffer.firm_count)

    @property
    def spares_free(self) -> int:
        """Spare groups that may still be reserved."""
        if self.stopping or self.finished is not None or self.steps_left == 0:
            return 0
        return self._buffer.spare_limit - self._buffer.spare_count

    def rewarded(self, member: Member, event: Rewarded) -> bool:
        """A trajectory was scored. True: this completes its group, so training may be able to continue."""
        self._trajectories.to_rewarded(member, event.raw, event.usable, event.token_hash)
        group = self._trajectories.group(member.group_id)
        group.rewarded.append(member.trajectory_id)
        group.usable += member.usable
        if group.usable != self._settings.group_size and len(group.rewarded) != len(group.members):
            return False
        self._drop_surplus(group)
        self._judge(group)
        return True

    def pushed(self, version: int) -> None:
        """A weight version is complete in the parameter server."""
        self.newest_version = max(self.newest_version, version)
        self.trainer_free(version)

    def trainer_free(self, version: int) -> None:
        """The trainer has a weight version and takes the next batch; the push may still be under way."""
        self._trained_version = max(self._trained_version, version)
        self._may_swap = True

    def advance(self) -> None:
        """Hand out the next batch, or end the run, if possible."""
        if self.finished is not None:
            return
        if self.stopping and self.newest_version < 0:
            self._finish("interrupted")  # no step has begun
        self._promote()
        if not self.trainer_idle:
            return
        self._swap()
        limit = self._settings.max_filtered_batches * self._buffer.batch_size
        if self.stopping:
            self._finish("interrupted")
        elif self.steps_left == 0:
            self._finish("completed")
        elif self._buffer.can_consume():
            self._consume(final=False)
        elif self._released_in_a_row >= limit:
            self._finish("filtered_out")
        elif self.exhausted and not self._drawing and self._trajectories.unreserved == 0:
            self._advance_exhausted()

    def draw(self) -> None:
        """Request as many groups as can be placed beyond those drawn already."""
        if self._drawing or self.stopping or self.finished is not None or self.newest_version < 0:
            return
        count = self._to_draw
        if count > 0:
            self._drawing = True
            self._outbox.put(DrawGroups(count=count, padding=self.exhausted))

    @property
    def _to_draw(self) -> int:
        """Groups that can be placed, or be spares, beyond those drawn already; may be negative."""
        batch, live = self._buffer.batch_size, len(self._buffer) + self._trajectories.unreserved
        if self.steps_left == 0:
            return 0
        if self.exhausted:
            missing = -live % batch if self._settings.last_batch == "pad" else 0
            return min(missing, self.steps_left * batch - live)
        window = self.newest_version + self._buffer.bound - self._buffer.next_buffer + 1
        return min(window, self.steps_left) * batch + self._buffer.spare_limit - live

    def drawn(self) -> None:
        """The last DrawGroups is answered."""
        self._drawing = False

    def _advance_exhausted(self) -> None:
        if len(self._buffer) == 0:
            self._finish("exhausted")
        elif self._settings.last_batch == "drop":
            if len(self._buffer) < self._buffer.batch_size:
                self._finish("exhausted")
        elif self._buffer.can_consume(final=True):
            self._consume(final=True)

    def stragglers(self, rule: StragglerRule, mean_response: int) -> list[Member]:
        """Trajectories to act on because an idle trainer waits for them alone. Cheap if it does not wait."""
        if rule.action == "wait" or self.finished is not None or not self.trainer_idle:
            return []
        buffer = self._buffer
        more = self._more_to_reserve
        if buffer.can_consume() or (more and self.reservable > 0 and buffer.can_reserve(buffer.next_buffer)):
            return []
        last = not more and buffer.firm_count < buffer.batch_size
        occupied = sum(done for _, done in buffer.by_deadline())
        if not last and occupied + rule.at_most < buffer.batch_size:
            return []  # each missing group has at least one unfinished trajectory
        groups = waited_for(buffer, lambda g: self._left(g).unfinished, final=last)
        members = [
            self._trajectories.member(m) for e in groups for m in self._trajectories.group(e.group).members
        ]
        return stragglers(members, rule, mean_response)

    @property
    def _more_to_reserve(self) -> bool:
        """Whether a group without a reservation exists or may still be drawn."""
        return not self.exhausted or self._drawing or self._trajectories.unreserved > 0 or self._to_draw > 0

    def _left(self, group_id: str) -> Left:
        members = map(self._trajectories.member, self._trajectories.group(group_id).members)
        tokens = [m.length - m.prompt_length for m in members if m.state in UNFINISHED]
        return Left(unfinished=len(tokens), tokens=sum(tokens))

    def _promote(self) -> None:
        """Give free firm places to spares, as far as the remaining steps need them."""
        buffer = self._buffer
        if not buffer.spare_count or not buffer.can_reserve(buffer.next_buffer):
            return  # if the latest deadline does not fit, none does
        for entry in buffer.spares():
            if self.reservable > 0 and buffer.can_promote(entry.group):
                buffer.promote(entry.group)
                self._outbox.record(Promote(group=entry.group))

    def _swap(self) -> None:
        """Let finished spares replace unfinished firm groups, if that completes the batch."""
        if not self._may_swap or not self._buffer.spare_count:
            return
        self._may_swap = False

        def left(group_id: str) -> Left | None:
            return None if self._trajectories.group(group_id).redrawn else self._left(group_id)

        for spare, firm in plan_swaps(self._buffer, left):
            self._buffer.swap(spare, firm)
            self._outbox.record(Swap(spare=spare, firm=firm))

    def _drop_surplus(self, group: Group) -> None:
        """Keep `group_size` members, usable ones first; abort the others."""
        size = self._settings.group_size
        if len(group.members) <= size:
            return
        order = {m: n for n, m in enumerate(group.rewarded)}
        ranked = sorted(
            map(self._trajectories.member, group.rewarded),
            key=lambda m: (not m.usable, order[m.trajectory_id]),
        )
        kept = {m.trajectory_id for m in ranked[:size]}
        surplus = [self._trajectories.member(m) for m in group.members if m not in kept]
        for member in surplus:
            self._abort(member, "surplus member")
            self._trajectories.forget_member(member, TrajectoryState.RELEASED)
        group.members = tuple(m for m in group.members if m in kept)
        ids = tuple(m.trajectory_id for m in surplus)
        self._outbox.put(Discard(trajectory_ids=ids, reason="aborted"))

    def _judge(self, group: Group) -> None:
        rewards = [m.raw for m in map(self._trajectories.member, group.members) if m.usable]
        if not rewards:
            self._release(group, "failed")
        elif self._filter is not None and self._filter(rewards):
            self._release(group, "filtered")
        else:
            self._buffer.occupy(group.group_id)
            group.occupied = True
            self._may_swap = True
            self._outbox.record(Occupy(group=group.group_id))

    def _release(self, group: Group, reason: Literal["filtered", "failed"]) -> None:
        self._buffer.release(group.group_id)
        self._drop(group.group_id, reason)
        self._may_swap = True
        self._released_in_a_row += 1

    def _drop(self, group_id: str, reason: Literal["filtered", "failed", "expired"]) -> None:
        """Record the release of a group that left the buffer, and abort its running trajectories."""
        self._outbox.record(Release(group=group_id, reason=reason))
        for trajectory_id in self._trajectories.group(group_id).members:
            self._abort(self._trajectories.member(trajectory_id), f"its group is released: {reason}")
        left = self._trajectories.forget(group_id, TrajectoryState.RELEASED)
        self._outbox.put(Discard(trajectory_ids=tuple(m.trajectory_id for m in left), reason=reason))

    def _consume(self, final: bool) -> None:
        consumed = self._buffer.consume(final=final)
        groups: list[ConsumedGroup] = []
        for entry in consumed.entries:
            members = self._trajectories.forget(entry.group, TrajectoryState.CONSUMED)
            ids = tuple([m.trajectory_id for m in members])
            hashes = tuple([m.token_hash for m in members])
            groups.append(ConsumedGroup(entry.group, entry.version, ids, hashes))
        self._released_in_a_row = 0
        self._outbox.record(Consume(buffer=consumed.buffer, final=final, groups=tuple(groups)))
        self._outbox.put(
            Train(
                step=consumed.buffer,
                groups=tuple((g.group, g.ids) for g in groups),
                final=final,
            )
        )
        self._expire(consumed.expired)

    def _expire(self, past: tuple[str, ...]) -> None:
        """Drop spares whose deadline is past or that no step needs; their prompts are drawn again."""
        unneeded: list[str] = []
        if self.steps_left == 0:
            unneeded = [entry.group for entry in self._buffer.spares()]
            for group_id in unneeded:
                self._buffer.release(group_id)
        for group_id in (*past, *unneeded):
            self._drop(group_id, "expired")
            self.exhausted = False

    def _finish(self, reason: EndReason) -> None:
        """Close the ledger, abort what still runs and drop it."""
        self.finished = reason
        self._outbox.record(End(steps=self._buffer.next_buffer, reason=reason))
        left: list[str] = []
        for group in list(self._trajectories.groups()):
            for trajectory_id in group.members:
                self._abort(self._trajectories.member(trajectory_id), f"the run is over: {reason}")
                left.append(trajectory_id)
            self._trajectories.forget(group.group_id, TrajectoryState.RELEASED)
        self._outbox.put(Discard(trajectory_ids=tuple(left), reason="discarded"))
        self._outbox.put(Finish(reason=reason))
