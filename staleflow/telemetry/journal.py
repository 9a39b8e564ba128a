"""Writes the journal: `storage.journal` has the table of its lines.

An event becomes one line at most, a report and a drawing one for each of their parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import BinaryIO

from staleflow.coordination.actions import Pull, Route
from staleflow.coordination.events import (
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    TrajectoryReport,
    TurnGiven,
    WaitingExternal,
)
from staleflow.errors import RunFolderError
from staleflow.storage.ledger import whole_bytes
from staleflow.telemetry.events import (
    BatchTaken,
    CheckpointSaved,
    CommandSent,
    Evaluated,
    GivenUp,
    Handlers,
    LoopClosed,
    RecordAppended,
    Released,
    ReportReceived,
    RewardReceived,
    RunFinished,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
    WeightsPushed,
)

FLUSH_EVERY_S = 1.0
"""What a killed run may lose of its journal."""
LOAD_EVERY_S = 0.25
"""Time between two `load` lines of one instance."""
LOADS_PER_S = 200
"""Most `load` lines a second in all: with more instances each is sampled less often."""


class JournalWriter:
    """A listener that appends to a journal file. One writer per file (the run folder's lock sees to that)."""

    def __init__(
        self,
        path: Path | None,
        *,
        attempt: int = 0,
        step: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        began: float | None = None,
        wall: float = 0.0,
    ) -> None:
        """Open `path` and note the beginning of an attempt; with None nothing is ever written.

        `clock` gives seconds that never go backwards, `began` its reading when the attempt began (default:
        now). Raises RunFolderError when the file cannot be opened.
        """
        self._clock = clock
        self._began = clock() if began is None else began
        self._flush_at = self._began + FLUSH_EVERY_S
        self._known: dict[str, _Known] = {}
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            file = path.open("a+b", buffering=1 << 16)
        except OSError as error:
            raise RunFolderError(f"cannot write the journal {path}: {error.strerror}") from error
        file.truncate(whole_bytes(path))
        self._file = file
        self._line(f'"k":"begin","a":{attempt},"step":{step},"wall":{wall:.3f}')

    def handlers(self) -> Handlers:
        """See `Listener`. None where nothing is written."""
        if self._file is None:
            return {}
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            CommandSent: self._command,
            ReportReceived: self._reported,
            GroupsDrawn: self._drawn,
            WaitingExternal: self._external,
            TurnGiven: self._given,
            RewardReceived: self._rewarded,
            GivenUp: self._gave_up,
            Released: self._released,
            StragglerResampled: self._resampled,
            StragglerTruncated: self._truncated,
            RecordAppended: self._ledger,
            BatchTaken: self._batch,
            StepTrained: self._trained,
            WeightsPushed: self._pushed,
            Evaluated: self._evaluated,
            CheckpointSaved: self._saved,
            RunFinished: self._finished,
            LoopClosed: lambda _: self.close(),
            TurnEnded: self._turned,
        }

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._file is not None:
            self._file.close()

    # ------------------------------------------------------------------ instances and commands

    def _joined(self, event: InstanceJoined) -> None:
        self._known[event.instance] = _Known(event.incarnation, event.version)
        self._line(
            f'"k":"join",{_source(event.instance, event.incarnation)},"v":{event.version},'
            f'"cap":{event.kv_capacity},"max":{event.max_running}'
        )

    def _lost(self, event: InstanceLost) -> None:
        self._known.pop(event.instance, None)
        back = ",".join([f"[{quoted(i)},{length}]" for i, length in event.lengths])
        self._line(
            f'"k":"lost",{_source(event.instance, event.incarnation)}{_why(event.reason)},"back":[{back}]'
        )

    def _command(self, event: CommandSent) -> None:
        command = event.command
        kind = type(command).__name__.lower()
        head = f'"k":"{kind}",{_source(command.instance, command.incarnation)},"q":{command.seq}'
        if isinstance(command, Pull):
            self._line(f'{head},"v":{command.version}{_why(command.reason)}')
            return
        head += f',"id":{quoted(command.trajectory_id)}'
        if isinstance(command, Route):
            head += f',"v":{command.min_version}'
            admission = command.admission
            if admission is not None:
                spare = ',"sp":1' if admission.spare else ""
                head += f',"ad":"{admission.kind}","av":{admission.version}{spare}'
        self._line(f'{head},"l":{command.length}{_why(command.reason)}')

    def _reported(self, event: ReportReceived) -> None:
        report = event.report
        known = self._known.get(report.instance)
        if known is None or known.incarnation != report.incarnation:
            return
        source = _source(report.instance, report.incarnation)
        for rejection in report.rejections:
            id_ = f',"id":{quoted(rejection.trajectory_id)}' if rejection.trajectory_id is not None else ""
            stale = ',"stale":1' if rejection.stale_version else ""
            self._line(f'"k":"reject",{source},"q":{rejection.seq}{id_}{_why(rejection.reason)}{stale}')
        for left in report.interrupted:
            self._left("back", event, left)
        for left in report.finished:
            self._left("done", event, left)
        news = (report.version, report.acked_seq, report.pull_seconds)
        if news != (known.version, known.acked_seq, known.pull_seconds):
            pulled = report.pull_seconds - known.pull_seconds
            seconds = f',"s":{pulled:.6f}' if pulled > 0 else ""
            self._line(f'"k":"report",{source},"v":{report.version},"q":{report.acked_seq}{seconds}')
            known.version, known.acked_seq, known.pull_seconds = news
        self._load(report, known)

    def _left(self, kind: str, event: ReportReceived, left: TrajectoryReport) -> None:
        where, id_ = quoted(event.report.instance), quoted(left.trajectory_id)
        body = f'"k":"{kind}","i":{where},"id":{id_},"l":{left.length}'
        if left.min_version is not None:
            body += f',"v":{left.min_version}'
        trajectory = event.find(left.trajectory_id)
        runs = () if trajectory is None else trajectory.version_runs
        if runs:
            body += f',"runs":[{",".join([f"[{v},{n}]" for v, n in runs])}]'
        if left.finish_reason is not None:
            body += f',"end":{quoted(left.finish_reason)}'
        self._line(body)

    def _load(self, report: InstanceReport, known: _Known) -> None:
        load = (report.running, report.waiting, report.kv_tokens, report.preemptions)
        if load == known.load:
            return
        now = self._clock()
        idle = report.running + report.waiting == 0  # it may be silent from now on
        if now < known.load_at and not (idle and not known.idle):
            return
        known.load, known.idle = load, idle
        known.load_at = now + max(LOAD_EVERY_S, len(self._known) / LOADS_PER_S)
        self._line(
            f'"k":"load","i":{quoted(report.instance)},"r":{report.running},"w":{report.waiting},'
            f'"kv":{report.kv_tokens},"cap":{report.kv_capacity},"pre":{report.preemptions}'
        )

    # ------------------------------------------------------------------ trajectories

    def _drawn(self, event: GroupsDrawn) -> None:
        for group in event.groups:
            members = ",".join(map(quoted, group.members))
            self._line(f'"k":"draw","g":{quoted(group.group_id)},"m":[{members}],"l":{group.prompt_length}')

    def _external(self, event: WaitingExternal) -> None:
        self._line(f'"k":"external","id":{quoted(event.trajectory_id)},"s":{event.limit_s:.6g}')

    def _given(self, event: TurnGiven) -> None:
        self._line(f'"k":"given","id":{quoted(event.trajectory_id)},"l":{event.length}')

    def _rewarded(self, event: RewardReceived) -> None:
        if event.dropped:
            return
        reward = event.reward
        raw = repr(float(reward.raw)) if math.isfinite(reward.raw) else json.dumps(reward.raw)
        self._line(
            f'"k":"score","id":{quoted(event.trajectory_id)},"raw":{raw},"st":{quoted(reward.status)},'
            f'"s":{reward.seconds:.6f}'
        )

    def _gave_up(self, event: GivenUp) -> None:
        self._line(f'"k":"gave_up","id":{quoted(event.trajectory_id)}{_why(event.reason)}')

    def _released(self, event: Released) -> None:
        if event.trajectories:
            ids = ",".join([quoted(t.trajectory_id) for t in event.trajectories])
            self._line(f'"k":"release","ids":[{ids}]{_why(event.reason)}')

    def _resampled(self, event: StragglerResampled) -> None:
        id_, new_id = quoted(event.dropped.trajectory_id), quoted(event.new_id)
        self._line(f'"k":"resample","id":{id_},"to":{new_id}{_why(event.reason)}')

    def _truncated(self, event: StragglerTruncated) -> None:
        self._line(f'"k":"cut","id":{quoted(event.trajectory.trajectory_id)}{_why(event.reason)}')

    def _ledger(self, event: RecordAppended) -> None:
        self._line(f'"k":"ledger","q":{event.seq}')

    # ------------------------------------------------------------------ training

    def _batch(self, event: BatchTaken) -> None:
        self._line(f'"k":"batch","step":{event.step},"s":{event.waited_s:.6f}')

    def _trained(self, event: StepTrained) -> None:
        self._line(f'"k":"trained","step":{event.step},"u":{event.update_s:.6f},"p":{event.waited_s:.6f}')

    def _pushed(self, event: WeightsPushed) -> None:
        self._line(f'"k":"push","v":{event.version},"s":{event.seconds:.6f}')

    def _evaluated(self, event: Evaluated) -> None:
        self._line(f'"k":"eval","v":{event.version},"s":{event.seconds:.6f}')

    def _saved(self, event: CheckpointSaved) -> None:
        self._line(f'"k":"save","v":{event.version},"s":{event.seconds:.6f}')

    def _finished(self, event: RunFinished) -> None:
        self._line(f'"k":"finish"{_why(event.reason)}')

    # ------------------------------------------------------------------ the file

    def _turned(self, _: TurnEnded) -> None:
        """What is written reaches the file also when nothing follows."""
        now = self._clock()
        if now >= self._flush_at:
            self._flush(now)

    def _line(self, body: str) -> None:
        if self._file is None:
            return
        now = self._clock()
        self._file.write(f'{{"t":{now - self._began:.6f},{body}}}\n'.encode())
        if now >= self._flush_at:
            self._flush(now)

    def _flush(self, now: float) -> None:
        self._flush_at = now + FLUSH_EVERY_S
        if self._file is not None:
            self._file.flush()


class _Known:
    """What the journal last said of an instance."""

    __slots__ = ("acked_seq", "idle", "incarnation", "load", "load_at", "pull_seconds", "version")

    def __init__(self, incarnation: int, version: int) -> None:
        self.incarnation = incarnation
        self.version = version
        self.acked_seq = 0
        self.pull_seconds = 0.0
        self.load = (0, 0, 0, 0)
        self.load_at = float("-inf")
        self.idle = True


def _source(instance: str, incarnation: int) -> str:
    return f'"i":{quoted(instance)},"n":{incarnation}'


def _why(reason: str) -> str:
    return f',"why":{quoted(reason)}' if reason else ""
