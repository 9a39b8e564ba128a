"""`Control`: the single writer of staleness buffer, lifecycle and ledger. Events and time in, actions out.

Invariants
----------
- A Route leaves only with its admission applied to the buffer in the same call (`dispatch.py`).
- Training step c is handed out when the trainer has weights c and consume is legal, never otherwise, so
  V + η >= c holds for everything that is trained (`batches.py`).
- Every transition of the protocol appends one ledger record; sequence numbers have no gap.

Flow::

    prompt source --DrawGroups/GroupsDrawn--> pending --Route--> running --Reported--> generated
        --Score/Rewarded--> rewarded --(group complete)--> filter --> occupied --Train--> trainer --Pushed-->

Backpressure: groups are drawn only as far as the buffer can place them under the newest version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from staleflow.coordination.actions import Action, Outbox
from staleflow.coordination.batches import Batches, BatchSettings, GroupFilter
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.dispatch import Dispatch
from staleflow.coordination.estimates import LengthStatistics, OnlineCosts
from staleflow.coordination.events import (
    Ended,
    Event,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Pushed,
    Reported,
    Rewarded,
    SourceExhausted,
    StopRequested,
    TrainedStep,
    TrainerFree,
    TurnGiven,
    WaitingExternal,
)
from staleflow.coordination.fleet import Fleet
from staleflow.coordination.snapshot import Resident, Snapshot
from staleflow.coordination.stragglers import StragglerRule
from staleflow.coordination.timing import CycleClock, Deadlines
from staleflow.coordination.trajectory_table import TrajectoryTable
from staleflow.coordination.view import ControlView
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Record

_URGENT = (GroupsDrawn, InstanceJoined, InstanceLost, Pushed, StopRequested, TrainerFree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a trajectory may make no progress, and how often it may fail."""

    stall_after_s: float = 60.0
    """A running trajectory without a new token for this long is interrupted and routed again."""
    max_retries: int = 3
    """Failures of one trajectory after which the next one masks it."""


class Control:
    """See the module's docstring. `handle` takes events, `cycle` makes decisions, `view` shows the state."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        coordinator: Coordinator,
        batches: BatchSettings,
        patience: Patience | None = None,
        stragglers: StragglerRule | None = None,
        expected_response: int = 64,
        group_filter: GroupFilter | None = None,
        costs: OnlineCosts | None = None,
        attempt: int = 0,
        next_seq: int = 0,
    ) -> None:
        """Start with an empty `buffer` whose next_buffer is the version that will be pushed first.

        `expected_response`, in tokens, is the first guess of the response length. `group_filter` gets the raw
        rewards of a complete group's usable members; True releases the group. `costs` learns from the
        instances' reports; default: the start values, refined.
        """
        patience = patience or Patience()
        self._buffer = buffer
        self._trajectories = TrajectoryTable()
        self._fleet = Fleet()
        self._outbox = Outbox(attempt=attempt, next_seq=next_seq)
        self._clock = CycleClock()
        self._costs = costs or OnlineCosts(START_VALUES)
        self._lengths = LengthStatistics(expected_response)
        self._dispatch = Dispatch(
            buffer=buffer,
            trajectories=self._trajectories,
            fleet=self._fleet,
            outbox=self._outbox,
            clock=self._clock,
            costs=self._costs,
            lengths=self._lengths,
            stall_after_s=patience.stall_after_s,
            max_retries=patience.max_retries,
        )
        self._batches = Batches(
            buffer=buffer,
            trajectories=self._trajectories,
            outbox=self._outbox,
            settings=batches,
            group_filter=group_filter,
            abort=self._dispatch.abort,
        )
        self._coordinator = coordinator
        self._stragglers = stragglers or StragglerRule()
        self._external = Deadlines()
        self._group_members = batches.group_size
        self.view = ControlView(
            buffer=buffer,
            trajectories=self._trajectories,
            fleet=self._fleet,
            batches=self._batches,
            costs=self._costs,
            clock=self._clock,
        )
        """All that others may read of Control's state."""

    # ------------------------------------------------------------------ events, cycles and notes

    def handle(self, event: Event) -> list[Action]:
        """Apply an event. Raises ProtocolError if it contradicts the known state."""
        if isinstance(event, Reported):  # most events; a report alone never lets training continue
            self._dispatch.report(event.report)
            return self._outbox.take()
        if isinstance(event, Rewarded):
            member = self._trajectories.find(event.trajectory_id)
            if member is not None and self._batches.rewarded(member, event):
                self._batches.advance()
            return self._outbox.take()
        self._clock.urgent = self._clock.urgent or isinstance(event, _URGENT)
        match event:
            case GroupsDrawn(groups=groups):
                self._batches.drawn()
                for drawn in groups:
                    self._trajectories.add(drawn)
                    self._group_members = len(drawn.members)
                    self._lengths.drawn(drawn.prompt_length)
            case SourceExhausted():
                self._batches.drawn()
                self._batches.exhausted = True
            case InstanceJoined():
                self._fleet.join(event)
            case InstanceLost():
                self._dispatch.lost(event)
            case TurnGiven(trajectory_id=trajectory_id, length=length):
                self._on_given(trajectory_id, length)
            case WaitingExternal(trajectory_id=trajectory_id, limit_s=limit_s):
                self._on_waiting_external(trajectory_id, limit_s)
            case Ended(trajectory_id=trajectory_id):
                self._on_ended(trajectory_id)
            case TrainedStep(record=record):
                self._outbox.record(record)
            case TrainerFree(version=version):
                self._batches.trainer_free(version)
            case Pushed(version=version):
                self._batches.pushed(version)
            case StopRequested():
                self._batches.stopping = True
        self._batches.advance()
        return self._outbox.take()

    def cycle(self, now: float) -> list[Action]:
        """Handle overdue trajectories, let the coordinator decide, and draw the groups that can be placed.

        `now` is in seconds on any clock that does not go backwards.
        """
        self._clock.now = now
        self._clock.urgent = False
        if self._batches.finished is None:
            self._dispatch.take_back_stalled()
            self._give_up_overdue()
            self._help_stragglers()
            decision = self._coordinator.step(self._snapshot())
            for command in decision.commands:
                self._dispatch.issue(command)
            due = (decision.wake_at, self._dispatch.next_stall, self._external.next_due)
            wake_at = min(at for at in due if at is not None)
            self._clock.wake_at = wake_at if wake_at < math.inf else None
            self._batches.draw()
            self._batches.advance()
        return self._outbox.take()

    def note(self, record: Record) -> list[Action]:
        """Append a record that is not a transition: the run's start, or a resume."""
        self._outbox.record(record)
        return self._outbox.take()

    # ------------------------------------------------------------------ the coordinator's snapshot

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            costs=self._costs.model,
            now=self._clock.now,
            next_buffer=self._buffer.next_buffer,
            newest_version=self._batches.newest_version,
            counts=self._buffer.counts(),
            reservable=self._batches.reservable,
            spares_free=self._batches.spares_free,
            pending=self._trajectories.pending,
            instances=self._fleet.views(),
            group_members=self._group_members,
            expected_growth=self._lengths.expected_growth,
            expected_held=self._lengths.expected_held,
            resident=self._residents,
        )

    def _residents(self, instance: str) -> tuple[Resident, ...]:
        """The trajectories of an instance, in the order of their Routes."""
        return tuple(
            Resident(
                trajectory_id=member.trajectory_id,
                group_id=member.group_id,
                group_version=version,
                length=member.length,
                response=member.length - member.prompt_length,
                routed_at=member.routed_at,
                routed_length=member.routed_length,
                fruitless=member.fruitless,
                leaving=member.leaving,
            )
            for member in map(self._trajectories.member, self._fleet.resident(instance))
            if (version := self._trajectories.group(member.group_id).version) is not None
        )

    # ------------------------------------------------------------------ overdue trajectories

    def _give_up_overdue(self) -> None:
        for trajectory_id in self._external.expired(self._clock.now):
            member = self._trajectories.find(trajectory_id)
            if member is not None:
                self._dispatch.give_up(member, "its environment did not answer in time")

    def _help_stragglers(self) -> None:
        """Act on the last trajectories that training waits for, before they are routed again."""
        rule = self._stragglers
        for member in self._batches.stragglers(rule, self._lengths.expected_growth):
            reason = f"straggler of step {self._buffer.next_buffer}: {rule.action}"
            if rule.action == "retry":
                self._dispatch.resample(member, reason)
            else:
                self._dispatch.truncate(member, reason)

    # ------------------------------------------------------------------ environments

    def _on_given(self, trajectory_id: str, length: int) -> None:
        member = self._trajectories.find(trajectory_id)
        if member is not None:
            self._external.forget(trajectory_id)
            self._trajectories.to_pending(member, length)

    def _on_waiting_external(self, trajectory_id: str, limit_s: float) -> None:
        member = self._trajectories.find(trajectory_id)
        if member is not None:
            self._trajectories.to_waiting_external(member)
            self._external.set(trajectory_id, limit_s)

    def _on_ended(self, trajectory_id: str) -> None:
        member = self._trajectories.find(trajectory_id)
        if member is not None:
            self._external.forget(trajectory_id)
            self._trajectories.to_generated(member, member.length)
