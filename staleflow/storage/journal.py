"""The journal file: what happened to each trajectory and each part, and when. One JSON object a line.

Invariants:

- a line is whole or absent, as in the ledger; opening an existing journal removes its torn tail and nothing
  else, so that a resumed attempt appends;
- what is older than a second has been handed to the operating system, as long as anything goes on;
- it repeats nothing that the ledger says: a `ledger` line gives the time of the record of that number;
- the loop never waits for it, and no decision depends on it.

Every line has `t`, seconds of the run's clock since the attempt began, and `k`, its kind. Times are those at
which the loop learned of a thing. Keys: `i` instance, `n` its incarnation, `q` sequence number of a command,
`id` trajectory, `g` group, `l` length in tokens (prompt and response), `v` weight version, `s` seconds,
`why` a reason. A key that has nothing to say is left out.

========= ====================================================================================
kind      further keys
========= ====================================================================================
begin     a attempt, step the one it begins with, wall seconds since the epoch
join      i n v, cap tokens its KV cache holds, max most trajectories decoded at once
lost      i n why, back [[id, l], ...] what returned to the trajectory server
draw      g, m [id, ...] its members, l
route     i n q id, v least version to run it, ad reserve or lower, av at which V, sp 1 as a spare, l why
interrupt i n q id l why
abort     i n q id l why
pull      i n q v why
report    i n, v loaded, q acknowledged, s stood still for pulls since the last report line
reject    i n q id (none: a pull) why, stale 1 for a route that came before its version
back      i id l, v oldest version of its tokens, runs [[version, tokens], ...] (-1: given tokens)
done      i id l v runs, end finish reason
load      i, r running, w waiting, kv tokens cached, cap, pre preemptions since the incarnation started
external  id, s limit: its environment answers later
given     id l: its environment added tokens
score     id, raw, st status, s
gave_up   id why
release   ids [id, ...] why
resample  id why, to id of the trajectory that takes its place in the group and starts anew
cut       id why: complete as it is, though it would have gone on
ledger    q number of the record
batch     step, s waited for by the trainer
trained   step, u seconds of the update, p seconds that its end waited for a push
push      v, s seconds of the push (none: see `trained`)
eval      v s
save      v s
finish    why
========= ====================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any, BinaryIO

from staleflow.coordination.actions import Command, Pull, Route
from staleflow.coordination.events import (
    DrawnGroup,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    TrajectoryReport,
)
from staleflow.errors import RunFolderError
from staleflow.storage.ledger import whole_bytes

FLUSH_EVERY_S = 1.0
"""What a killed run may lose of its journal."""
LOAD_EVERY_S = 0.25
"""Time between two `load` lines of one instance."""
LOADS_PER_S = 200
"""Most `load` lines a second in all: with more instances each is sampled less often."""

VersionRuns = Mapping[str, Sequence[tuple[int, int]]]
"""By trajectory: (version, tokens) of each stretch of its response that one version generated."""


class JournalWriter:
    """Appends to a journal file. One writer per file (the run folder's lock sees to that)."""

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

    @property
    def is_on(self) -> bool:
        """Whether anything is written; asking spares the caller what it would gather for it."""
        return self._file is not None

    def flush_if_due(self) -> None:
        """Call now and then, so that what is written reaches the file also when nothing follows."""
        if self._file is not None and self._clock() >= self._flush_at:
            self._flush_at = self._clock() + FLUSH_EVERY_S
            self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._file is not None:
            self._file.close()

    # ------------------------------------------------------------------ instances and commands

    def joined(self, event: InstanceJoined) -> None:
        """An instance is up."""
        self._known[event.instance] = _Known(event.incarnation, event.version)
        self._line(
            f'"k":"join",{_source(event.instance, event.incarnation)},"v":{event.version},'
            f'"cap":{event.kv_capacity},"max":{event.max_running}'
        )

    def lost(self, event: InstanceLost) -> None:
        """An instance is gone; its trajectories are back."""
        self._known.pop(event.instance, None)
        back = ",".join([f"[{quoted(i)},{length}]" for i, length in event.lengths])
        self._line(
            f'"k":"lost",{_source(event.instance, event.incarnation)}{_why(event.reason)},"back":[{back}]'
        )

    def command(self, command: Command) -> None:
        """A command goes out."""
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

    def reported(self, report: InstanceReport, runs: VersionRuns | None = None) -> None:
        """A report came in; `runs` has the trajectories that it says have left, as far as known."""
        known = self._known.get(report.instance)
        if self._file is None or known is None or known.incarnation != report.incarnation:
            return
        runs = runs or {}
        for rejection in report.rejections:
            id_ = f',"id":{quoted(rejection.trajectory_id)}' if rejection.trajectory_id is not None else ""
            stale = ',"stale":1' if rejection.stale_version else ""
            source = _source(report.instance, report.incarnation)
            self._line(f'"k":"reject",{source},"q":{rejection.seq}{id_}{_why(rejection.reason)}{stale}')
        for left in report.interrupted:
            self._left("back", report.instance, left, runs)
        for left in report.finished:
            self._left("done", report.instance, left, runs)
        news = (report.version, report.acked_seq, report.pull_seconds)
        if news != (known.version, known.acked_seq, known.pull_seconds):
            pulled = report.pull_seconds - known.pull_seconds
            seconds = f',"s":{pulled:.6f}' if pulled > 0 else ""
            source = _source(report.instance, report.incarnation)
            self._line(f'"k":"report",{source},"v":{report.version},"q":{report.acked_seq}{seconds}')
            known.version, known.acked_seq, known.pull_seconds = news
        self._load(report, known)

    def _left(self, kind: str, instance: str, report: TrajectoryReport, runs: VersionRuns) -> None:
        body = f'"k":"{kind}","i":{quoted(instance)},"id":{quoted(report.trajectory_id)},"l":{report.length}'
        if report.min_version is not None:
            body += f',"v":{report.min_version}'
        stretches = runs.get(report.trajectory_id)
        if stretches:
            body += f',"runs":[{",".join([f"[{v},{n}]" for v, n in stretches])}]'
        if report.finish_reason is not None:
            body += f',"end":{quoted(report.finish_reason)}'
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

    def drawn(self, groups: Iterable[DrawnGroup]) -> None:
        """Groups were made from prompts."""
        for group in groups:
            members = ",".join(map(quoted, group.members))
            self._line(f'"k":"draw","g":{quoted(group.group_id)},"m":[{members}],"l":{group.prompt_length}')

    def external(self, trajectory_id: str, limit_s: float) -> None:
        """The environment of a trajectory answers later."""
        self._line(f'"k":"external","id":{quoted(trajectory_id)},"s":{limit_s:.6g}')

    def given(self, trajectory_id: str, length: int) -> None:
        """The environment added tokens."""
        self._line(f'"k":"given","id":{quoted(trajectory_id)},"l":{length}')

    def scored(self, trajectory_id: str, raw: float, status: str, seconds: float = 0.0) -> None:
        """The verifier answered after `seconds`; `raw` is its own score."""
        value = repr(float(raw)) if math.isfinite(raw) else json.dumps(raw)
        self._line(
            f'"k":"score","id":{quoted(trajectory_id)},"raw":{value},"st":{quoted(status)},"s":{seconds:.6f}'
        )

    def gave_up(self, trajectory_id: str, reason: str) -> None:
        """A trajectory failed too often: it is masked."""
        self._line(f'"k":"gave_up","id":{quoted(trajectory_id)}{_why(reason)}')

    def released(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Trajectories were dropped."""
        if trajectory_ids:
            ids = ",".join(map(quoted, trajectory_ids))
            self._line(f'"k":"release","ids":[{ids}]{_why(reason)}')

    def resampled(self, trajectory_id: str, new_id: str, reason: str) -> None:
        """A straggler was dropped for another trajectory of its prompt."""
        self._line(f'"k":"resample","id":{quoted(trajectory_id)},"to":{quoted(new_id)}{_why(reason)}')

    def truncated(self, trajectory_id: str, reason: str) -> None:
        """A straggler was cut off where it was."""
        self._line(f'"k":"cut","id":{quoted(trajectory_id)}{_why(reason)}')

    def ledger(self, seq: int) -> None:
        """The ledger's record of this number was appended."""
        self._line(f'"k":"ledger","q":{seq}')

    # ------------------------------------------------------------------ training

    def batch(self, step: int, waited_s: float) -> None:
        """A batch was handed to the trainer, which had waited for it."""
        self._line(f'"k":"batch","step":{step},"s":{waited_s:.6f}')

    def trained(self, step: int, update_s: float, push_s: float) -> None:
        """A step is trained. `push_s`: of the push that its end waited for."""
        self._line(f'"k":"trained","step":{step},"u":{update_s:.6f},"p":{push_s:.6f}')

    def pushed(self, version: int, seconds: float | None = None) -> None:
        """Weights are in the parameter server. `seconds`: of a push that ran behind the trainer's work."""
        took = "" if seconds is None else f',"s":{seconds:.6f}'
        self._line(f'"k":"push","v":{version}{took}')

    def evaluated(self, version: int, seconds: float) -> None:
        """An evaluation is done."""
        self._line(f'"k":"eval","v":{version},"s":{seconds:.6f}')

    def saved(self, version: int, seconds: float) -> None:
        """A checkpoint is on disk."""
        self._line(f'"k":"save","v":{version},"s":{seconds:.6f}')

    def finished(self, reason: str) -> None:
        """The run is over."""
        self._line(f'"k":"finish"{_why(reason)}')

    # ------------------------------------------------------------------

    def _line(self, body: str) -> None:
        if self._file is None:
            return
        now = self._clock()
        self._file.write(f'{{"t":{now - self._began:.6f},{body}}}\n'.encode())
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_EVERY_S
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


Line = dict[str, Any]
"""One line as a mapping; the table in the module's docstring has its keys."""


def read_journal(path: Path) -> Iterator[Line]:
    """Yield each whole line in order, `a` (the attempt) added to it; a torn last line is left out.

    Raises RunFolderError naming file and line when a whole line is none of a journal, or there is no file.
    """
    attempt = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line: Line = json.loads(text)
                    attempt = line["a"] if line["k"] == "begin" else attempt
                    float(line["t"])
                except (ValueError, KeyError, TypeError) as error:
                    raise RunFolderError(f"{path}, line {number}: not a journal line ({error})") from error
                line["a"] = attempt
                yield line
    except OSError as error:
        raise RunFolderError(f"cannot read the journal {path}: {error.strerror}") from error
