"""A run folder whose journal and ledger are written line by line, at times that the test sets."""

from __future__ import annotations

from pathlib import Path

from staleflow.coordination.actions import Abort, Admission, Interrupt, Pull, Route
from staleflow.coordination.events import (
    DrawnGroup,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Rejection,
    TrajectoryReport,
)
from staleflow.protocol.records import Consume, ConsumedGroup, Record, Start, Trained, TrainedMember
from staleflow.storage import JournalWriter, LedgerWriter


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
        self.journal = JournalWriter(
            self.folder / "journal.jsonl",
            attempt=self._attempt,
            step=step,
            clock=lambda: self.now,
            began=0.0,
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
        self.journal.ledger(self._seq)
        self._seq += 1

    def join(self, instance: str, version: int = 0, incarnation: int = 1) -> None:
        self.journal.joined(
            InstanceJoined(
                instance=instance, incarnation=incarnation, version=version, kv_capacity=1000, max_running=8
            )
        )

    def lose(self, instance: str, lengths: tuple[tuple[str, int], ...], reason: str) -> None:
        self.journal.lost(InstanceLost(instance=instance, incarnation=1, lengths=lengths, reason=reason))

    def draw(self, group: str, members: int = 2, length: int = 10) -> None:
        ids = tuple(f"{group}-m{member}" for member in range(members))
        self.journal.drawn([DrawnGroup(group_id=group, members=ids, prompt_length=length)])

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
        self.journal.reported(report, runs)

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
        self.journal.batch(step, waited)

    def trained(self, step: int, *members: TrainedMember, update_s: float, push_s: float) -> None:
        self.record(Trained(step=step, version=step, trajectories=members))
        self.journal.trained(step, update_s, push_s)
        self.journal.pushed(step + 1)


def left(id_: str, length: int, version: int | None, finish: str | None = None) -> TrajectoryReport:
    """A trajectory as an instance reports that it left."""
    return TrajectoryReport(trajectory_id=id_, length=length, min_version=version, finish_reason=finish)
