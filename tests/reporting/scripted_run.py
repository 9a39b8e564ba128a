"""A run folder whose journal and ledger are written line by line, at times that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from staleflow.coordination.actions import Abort, Admission, Command, Interrupt, Pull, Route
from staleflow.coordination.events import (
    DrawnGroup,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Rejection,
    TrajectoryReport,
    TurnGiven,
    WaitingExternal,
)
from staleflow.data.trajectory import Reward
from staleflow.protocol.records import Consume, ConsumedGroup, Record, Start, Trained, TrainedMember
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.storage import LedgerWriter
from staleflow.telemetry.events import (
    BatchTaken,
    CheckpointSaved,
    CommandSent,
    Evaluated,
    EventStream,
    GivenUp,
    RecordAppended,
    Released,
    ReportReceived,
    RewardReceived,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    WeightsPushed,
)
from staleflow.telemetry.journal import JournalWriter


def alive(id_: str, runs: Sequence[tuple[int, int]] = ()) -> SimulatedTrajectory:
    """A trajectory of which a journal knows no more than this."""
    trajectory = SimulatedTrajectory(id_, "", prompt=1, target=2, truncated=False)
    trajectory.runs = list(runs)
    return trajectory


class ScriptedJournal:
    """A journal that is told what happened."""

    def __init__(self, writer: JournalWriter) -> None:
        self.close = writer.close
        self.tell = EventStream([writer]).tell

    def pushed(self, version: int, seconds: float = 0.0) -> None:
        self.tell(WeightsPushed(version=version, seconds=seconds))

    def saved(self, version: int, seconds: float) -> None:
        self.tell(CheckpointSaved(version=version, seconds=seconds))

    def evaluated(self, version: int, seconds: float) -> None:
        self.tell(Evaluated(version=version, seconds=seconds))

    def scored(self, id_: str, raw: float, status: str) -> None:
        self.tell(RewardReceived(id_, Reward(raw=raw, status=status), False))

    def gave_up(self, id_: str, reason: str) -> None:
        self.tell(GivenUp(trajectory_id=id_, reason=reason))

    def released(self, ids: Sequence[str], reason: str) -> None:
        self.tell(Released([alive(id_) for id_ in ids], reason))

    def resampled(self, id_: str, new_id: str, reason: str) -> None:
        self.tell(StragglerResampled(dropped=alive(id_), new_id=new_id, reason=reason))

    def truncated(self, id_: str, reason: str) -> None:
        self.tell(StragglerTruncated(trajectory=alive(id_), reason=reason))

    def external(self, id_: str, limit_s: float) -> None:
        self.tell(WaitingExternal(trajectory_id=id_, limit_s=limit_s))

    def given(self, id_: str, length: int) -> None:
        self.tell(TurnGiven(trajectory_id=id_, length=length))

    def command(self, command: Command) -> None:
        self.tell(CommandSent(command))


class ScriptedRun:
    """One folder; `at` sets the time, the rest happens then."""

    def __init__(self, folder: Path, *, bound: int = 1, batch_size: int = 1, group_size: int = 2) -> None:
        self.folder = folder
        self.now = 0.0
        self._seq = 0
        self._attempt = 0
        self._revisions = 0
        self._open(0)
        self.record(
            Start(
                bound=bound,
                batch_size=batch_size,
                group_size=group_size,
                last_batch="train",
                spare_limit=0,
            )
        )

    def _open(self, step: int) -> None:
        self._ledger = LedgerWriter(self.folder / "ledger.jsonl")
        self.journal = ScriptedJournal(
            JournalWriter(
                self.folder / "journal.jsonl",
                attempt=self._attempt,
                step=step,
                clock=lambda: self.now,
                began=0.0,
            )
        )

    def resume(self, step: int) -> None:
        """A later attempt, its time from 0 on."""
        self.close()
        self.now = 0.0
        self._attempt += 1
        self._open(step)

    def close(self) -> None:
        self.journal.close()
        self._ledger.close()

    def at(self, now: float) -> None:
        assert now >= self.now
        self.now = now

    def record(self, record: Record) -> None:
        self._ledger.append(record, self._seq, self._attempt)
        self.journal.tell(RecordAppended(self._seq))
        self._seq += 1

    def join(self, instance: str, version: int = 0, incarnation: int = 1) -> None:
        self.journal.tell(
            InstanceJoined(
                instance=instance, incarnation=incarnation, version=version, kv_capacity=1000, max_running=8
            )
        )

    def lose(self, instance: str, lengths: tuple[tuple[str, int], ...], reason: str) -> None:
        self.journal.tell(InstanceLost(instance=instance, incarnation=1, lengths=lengths, reason=reason))

    def draw(self, group: str, members: int = 2, length: int = 10) -> None:
        ids = tuple(f"{group}-m{member}" for member in range(members))
        drawn = DrawnGroup(group_id=group, members=ids, prompt_length=length)
        self.journal.tell(GroupsDrawn(groups=(drawn,)))

    def route(
        self,
        instance: str,
        seq: int,
        id_: str,
        *,
        length: int = 10,
        version: int = 0,
        admission: Admission | None = None,
        reason: str = "",
        incarnation: int = 1,
    ) -> None:
        self.journal.command(
            Route(
                instance=instance,
                incarnation=incarnation,
                seq=seq,
                trajectory_id=id_,
                group_id=id_.rpartition("-m")[0],
                min_version=version,
                admission=admission,
                length=length,
                reason=reason,
            )
        )

    def interrupt(self, instance: str, seq: int, id_: str, *, length: int, reason: str) -> None:
        self.journal.command(
            Interrupt(
                instance=instance, incarnation=1, seq=seq, trajectory_id=id_, length=length, reason=reason
            )
        )

    def abort(self, instance: str, seq: int, id_: str, *, length: int, reason: str) -> None:
        self.journal.command(
            Abort(instance=instance, incarnation=1, seq=seq, trajectory_id=id_, length=length, reason=reason)
        )

    def pull(self, instance: str, seq: int, *, version: int, reason: str) -> None:
        self.journal.command(Pull(instance=instance, incarnation=1, seq=seq, version=version, reason=reason))

    def report(
        self,
        instance: str,
        acked: int,
        *,
        version: int = 0,
        finished: tuple[TrajectoryReport, ...] = (),
        interrupted: tuple[TrajectoryReport, ...] = (),
        rejections: tuple[Rejection, ...] = (),
        runs: dict[str, tuple[tuple[int, int], ...]] | None = None,
        running: int = 0,
        waiting: int = 0,
        kv_tokens: int = 0,
        pull_seconds: float = 0.0,
        incarnation: int = 1,
    ) -> None:
        self._revisions += 1
        report = InstanceReport(
            instance=instance,
            incarnation=incarnation,
            revision=self._revisions,
            version=version,
            acked_seq=acked,
            finished=finished,
            interrupted=interrupted,
            rejections=rejections,
            running=running,
            waiting=waiting,
            kv_tokens=kv_tokens,
            kv_capacity=1000,
            pull_seconds=pull_seconds,
        )
        find = {id_: alive(id_, theirs) for id_, theirs in (runs or {}).items()}.get
        self.journal.tell(ReportReceived(report, (), find))

    def consume(self, step: int, *groups: tuple[str, int], waited: float, members: int = 2) -> None:
        """The groups, each with its V, go to the trainer."""
        taken = tuple(
            ConsumedGroup(
                group=group,
                version=version,
                ids=tuple(f"{group}-m{member}" for member in range(members)),
                hashes=("",) * members,
            )
            for group, version in groups
        )
        self.record(Consume(buffer=step, final=False, groups=taken))
        self.journal.tell(BatchTaken(step=step, groups=(), waited_s=waited))

    def trained(
        self, step: int, *members: TrainedMember, update_s: float, push_s: float, waited_s: float = 0.0
    ) -> None:
        """`push_s`: of the push after the step; `waited_s`: for the one before it."""
        self.record(Trained(step=step, version=step, trajectories=members))
        self.journal.tell(
            StepTrained(step=step, trained=members, metrics={}, update_s=update_s, waited_s=waited_s)
        )
        self.journal.pushed(step + 1, push_s)


def left(id_: str, length: int, version: int | None, finish: str | None = None) -> TrajectoryReport:
    """A trajectory as an instance reports that it left."""
    return TrajectoryReport(trajectory_id=id_, length=length, min_version=version, finish_reason=finish)
