"""Rows of kind `event`: what happens seldom and is worth a line each."""

from __future__ import annotations

from staleflow.coordination.events import InstanceJoined
from staleflow.telemetry.events import (
    CheckpointSaved,
    EvaluationFailed,
    EvaluationSkipped,
    GivenUp,
    Handlers,
    InstanceDown,
    ReportReceived,
    RunFinished,
    StragglerResampled,
    StragglerTruncated,
)
from staleflow.telemetry.row_queue import RowQueue


class EventRows:
    """A listener."""

    def __init__(self, rows: RowQueue) -> None:
        self._rows = rows

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            InstanceJoined: self._joined,
            InstanceDown: self._down,
            ReportReceived: self._reported,
            StragglerResampled: self._resampled,
            StragglerTruncated: self._truncated,
            GivenUp: self._given_up,
            CheckpointSaved: self._saved,
            EvaluationFailed: self._evaluation_failed,
            EvaluationSkipped: self._evaluation_skipped,
            RunFinished: lambda event: self._add("finish", event.reason),
        }

    def _joined(self, event: InstanceJoined) -> None:
        self._add("instance_up", f"{event.instance} is up")

    def _down(self, event: InstanceDown) -> None:
        self._add("instance_down", f"{event.instance} was lost: {event.reason}")

    def _reported(self, event: ReportReceived) -> None:
        for rejection in event.report.rejections:
            if rejection.stale_version:
                continue  # follows from a pull that was refused, which has a line of its own
            what = rejection.trajectory_id or "a pull"
            self._add("rejected", f"{event.report.instance} refused {what}: {rejection.reason}")

    def _resampled(self, event: StragglerResampled) -> None:
        what = f"trajectory {event.dropped.trajectory_id} is sampled anew"
        self._add("straggler", f"{what}: {event.reason}")

    def _truncated(self, event: StragglerTruncated) -> None:
        trajectory = event.trajectory
        what = f"trajectory {trajectory.trajectory_id} is cut at {trajectory.response_len} tokens"
        self._add("straggler", f"{what}: {event.reason}")

    def _given_up(self, event: GivenUp) -> None:
        self._add("gave_up", f"trajectory {event.trajectory_id} is masked: {event.reason}")

    def _saved(self, event: CheckpointSaved) -> None:
        self._add("checkpoint", f"saved step {event.version} in {event.seconds:.1f} s")

    def _evaluation_failed(self, event: EvaluationFailed) -> None:
        self._add("evaluation_failed", f"version {event.version} is not evaluated: {event.reason}")

    def _evaluation_skipped(self, event: EvaluationSkipped) -> None:
        text = f"version {event.version} is not evaluated: evaluation is behind (see evaluation.backlog)"
        self._add("evaluation_skipped", text)

    def _add(self, name: str, text: str) -> None:
        self._rows.add("event", {"event/name": name, "event/text": text})
