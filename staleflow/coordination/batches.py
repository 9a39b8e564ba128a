"""From rewarded trajectories to training batches: completion, filter, occupy, consume, and the run's end.

Invariants: a batch is handed out only when its step's weights are the newest pushed and the buffer says that
consume is legal; only groups that are complete and passed the filter are occupied; groups are drawn only
as far as the buffer can place them under the newest version, and never beyond the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from staleflow.coordination.effects import Discard, DrawGroups, Finish, Train
from staleflow.coordination.events import Rewarded
from staleflow.coordination.outbox import Outbox
from staleflow.coordination.population import Group, Member, Population
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import Consume, ConsumedGroup, End, EndReason, LastBatch, Occupy, Release

GroupFilter = Callable[[Sequence[float]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What forming batches needs to know of the config."""

    steps: int
    """Training steps of the whole run, those before a resume included."""
    group_size: int
    last_batch: LastBatch = "train"
    max_filtered_batches: int = 20
    """The run ends when this many batches of groups in a row were released."""


class Batches:
    """Groups on their way to the trainer."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        population: Population,
        outbox: Outbox,
        settings: BatchSettings,
        group_filter: GroupFilter | None,
        abort: Callable[[Member, str], None],
    ) -> None:
        self.newest_version = -1
        self.finished: EndReason | None = None
        self.exhausted = False
        self.stopping = False
        self._buffer = buffer
        self._population = population
        self._outbox = outbox
        self._settings = settings
        self._filter = group_filter
        self._abort = abort
        self._drawing = False
        self._released_in_a_row = 0

    @property
    def trainer_idle(self) -> bool:
        """Whether the weights that the next step starts from have been pushed."""
        return self.newest_version == self._buffer.next_buffer

    @property
    def steps_left(self) -> int:
        """Batches that may still be consumed."""
        return max(0, self._settings.steps - self._buffer.next_buffer)

    @property
    def reservable(self) -> int:
        """Groups that may still be reserved before the run's last step."""
        if self.stopping or self.finished is not None:
            return 0
        return max(0, self.steps_left * self._buffer.batch_size - len(self._buffer))

    def rewarded(self, member: Member, event: Rewarded) -> None:
        """A trajectory was scored; its group may be complete now."""
        self._population.to_rewarded(member, event.raw, event.usable, event.token_hash)
        group = self._population.group(member.group_id)
        group.rewarded.append(member.trajectory_id)
        if len(group.rewarded) == self._settings.group_size:
            self._drop_surplus(group)
            self._judge(group)

    def advance(self) -> None:
        """Hand out the next batch, or end the run, if it is time."""
        if self.finished is not None:
            return
        if self.stopping and self.newest_version < 0:
            self._finish("interrupted")  # there is no step to wait for yet
        if not self.trainer_idle:
            return
        limit = self._settings.max_filtered_batches * self._buffer.batch_size
        if self.stopping:
            self._finish("interrupted")
        elif self.steps_left == 0:
            self._finish("completed")
        elif self._buffer.can_consume():
            self._consume(final=False)
        elif self._released_in_a_row >= limit:
            self._finish("filtered_out")
        elif self.exhausted and not self._drawing and self._population.unreserved == 0:
            self._advance_exhausted()

    def draw(self) -> None:
        """Ask for as many groups as can be placed and are not there yet."""
        if self._drawing or self.stopping or self.finished is not None or self.newest_version < 0:
            return
        batch, live = self._buffer.batch_size, len(self._buffer) + self._population.unreserved
        if self.exhausted:
            missing = -live % batch if self._settings.last_batch == "pad" else 0
            count = min(missing, self.steps_left * batch - live)
        else:
            window = self.newest_version + self._buffer.bound - self._buffer.next_buffer + 1
            count = min(window, self.steps_left) * batch - live
        if count > 0:
            self._drawing = True
            self._outbox.put(DrawGroups(count=count, padding=self.exhausted))

    def drawn(self) -> None:
        """The answer to the last DrawGroups is in."""
        self._drawing = False

    def _advance_exhausted(self) -> None:
        if len(self._buffer) == 0:
            self._finish("exhausted")
        elif self._settings.last_batch == "drop":
            if len(self._buffer) < self._buffer.batch_size:
                self._finish("exhausted")
        elif self._buffer.can_consume(final=True):
            self._consume(final=True)

    def _drop_surplus(self, group: Group) -> None:
        kept = set(group.rewarded)
        surplus = [self._population.member(m) for m in group.members if m not in kept]
        for member in surplus:
            self._abort(member, "surplus member")
            self._population.forget_member(member, TrajectoryState.RELEASED)
        if surplus:
            ids = tuple(m.trajectory_id for m in surplus)
            self._outbox.put(Discard(trajectory_ids=ids, reason="aborted"))

    def _judge(self, group: Group) -> None:
        rewards = [m.raw for m in map(self._population.member, group.rewarded) if m.usable]
        if not rewards:
            self._release(group, "failed")
        elif self._filter is not None and self._filter(rewards):
            self._release(group, "filtered")
        else:
            self._buffer.occupy(group.group_id)
            group.occupied = True
            self._outbox.record(Occupy(group=group.group_id))

    def _release(self, group: Group, reason: Literal["filtered", "failed"]) -> None:
        self._buffer.release(group.group_id)
        self._outbox.record(Release(group=group.group_id, reason=reason))
        left = self._population.forget(group.group_id, TrajectoryState.RELEASED)
        self._outbox.put(Discard(trajectory_ids=tuple(m.trajectory_id for m in left), reason=reason))
        self._released_in_a_row += 1

    def _consume(self, final: bool) -> None:
        consumed = self._buffer.consume(final=final)
        groups: list[ConsumedGroup] = []
        for entry in consumed.entries:
            members = self._population.forget(entry.group, TrajectoryState.CONSUMED)
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

    def _finish(self, reason: EndReason) -> None:
        """Close the ledger; what is left is dropped, and instances may stop working on it."""
        self.finished = reason
        self._outbox.record(End(steps=self._buffer.next_buffer, reason=reason))
        left: list[str] = []
        for group in list(self._population.groups()):
            for trajectory_id in group.members:
                member = self._population.find(trajectory_id)
                if member is not None:  # a surplus one is gone already
                    self._abort(member, f"the run is over: {reason}")
                    left.append(trajectory_id)
            self._population.forget(group.group_id, TrajectoryState.RELEASED)
        self._outbox.put(Discard(trajectory_ids=tuple(left), reason="discarded"))
        self._outbox.put(Finish(reason=reason))
