"""The journal as `trace.json`, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Invariants: written as it is read, so memory is that of what is alive at one moment; every opened slice is
closed, also where the journal breaks off; slices of one track do not overlap and begin in order.

Tracks: a process for the coordinator (instants: pulls ordered, migrations, releases, batches, instances that
join and are lost), one for the trainer (waiting, update and push; checkpoints; evaluations), and one per
instance (counters of trajectories and KV tokens, slices for pulls, instants for Interrupt and Abort, and an
async slice for the stay of each trajectory). A later attempt follows the one before after a second.

Format: Trace Event Format, JSON object form; `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from staleflow.errors import RunFolderError
from staleflow.reporting.history.moves import Move, Moves, journal_lines
from staleflow.storage.journal import Line, read_journal

COORDINATOR, TRAINER, FIRST_INSTANCE = 1, 2, 3
"""Process numbers."""
STEPS, CHECKPOINTS, EVALUATIONS, PUSHES = 1, 2, 3, 4
"""Tracks of the trainer."""
COMMANDS, PULLS = 1, 2
"""Tracks of an instance; its trajectories have tracks of their own."""
BETWEEN_ATTEMPTS_S = 1.0


def trace_run(run: Path, output: Path) -> int:
    """The same for a run folder. Raises RunFolderError when it has no journal."""
    return _write(journal_lines(run), output)


def write_trace(journal: Path, output: Path) -> int:
    """Write the trace of a journal file, whole or not at all; returns the number of events.

    Raises RunFolderError when the journal cannot be read or the output not be written.
    """
    return _write(read_journal(journal), output)


def _write(lines: Iterable[Line], output: Path) -> int:
    if output.is_file() and output.suffix != ".json":
        raise RunFolderError(f"{output} exists and is not a JSON file: choose another output")
    aside = output.with_name(f".{output.name}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            trace = _Trace(file)
            trace.take(lines)
        os.replace(aside, output)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunFolderError(
            f"cannot write the trace {output}: {error.strerror}; choose another file"
        ) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return trace.events


class _Trace:
    """Writes events while lines come in."""

    def __init__(self, file: TextIO) -> None:
        self.events = 0
        self._file = file
        self._zero = 0.0
        self._now = 0.0
        self._pids: dict[str, int] = {}
        self._free_until: dict[tuple[int, int], int] = {}
        """By track: where its last slice ended, in microseconds."""
        self._moves = Moves()
        self._stays: dict[str, int] = {}
        """By trajectory on an instance: number of the stay."""
        self._routes = 0
        self._takers: dict[str, Callable[[float, Line], None]] = {
            "begin": self._begin,
            "join": self._join,
            "lost": self._lost,
            "load": self._load,
            "report": self._report,
            "interrupt": self._interrupt,
            "abort": self._abort,
            "pull": self._pull,
            "reject": self._reject,
            "release": self._release,
            "gave_up": self._gave_up,
            "resample": self._resample,
            "cut": self._cut,
            "batch": self._batch,
            "trained": self._trained,
            "push": self._push,
            "save": self._save,
            "eval": self._eval,
            "finish": self._finish,
        }

    def take(self, lines: Iterable[Line]) -> None:
        """Write the whole file."""
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._process(COORDINATOR, "coordinator", {})
        self._process(
            TRAINER,
            "trainer",
            {STEPS: "steps", CHECKPOINTS: "checkpoints", EVALUATIONS: "evaluations", PUSHES: "pushes"},
        )
        for line in lines:
            if line["k"] != "begin":
                self._now = self._zero + line["t"]
            for move in self._moves.take(line):
                self._stay(line, move)
            take = self._takers.get(line["k"])
            if take is not None:
                take(self._now, line)
        for move in self._moves.end():
            self._stay({}, move)
        self._file.write("\n]}\n")

    # ------------------------------------------------------------------ attempts and instances

    def _begin(self, t: float, line: Line) -> None:
        if self.events > 0 and t > 0:
            self._zero = t + BETWEEN_ATTEMPTS_S
        self._now = self._zero
        self._instant(self._now, COORDINATOR, f"attempt {line['a']} begins with step {line['step']}", {})

    def _join(self, t: float, line: Line) -> None:
        instance = line["i"]
        self._pid(instance)
        self._instant(t, COORDINATOR, f"{instance} joins", {"version": line["v"], "incarnation": line["n"]})

    def _lost(self, t: float, line: Line) -> None:
        self._instant(t, COORDINATOR, f"{line['i']} is lost", _reason(line))
        self._counters(t, line["i"], 0, 0, 0)

    def _load(self, t: float, line: Line) -> None:
        self._counters(t, line["i"], line["r"], line["w"], line["kv"])

    def _report(self, t: float, line: Line) -> None:
        if "s" in line:
            pid = self._pid(line["i"])
            self._slice(pid, PULLS, f"pull of version {line['v']}", t - line["s"], t, {"version": line["v"]})

    def _pid(self, instance: str) -> int:
        """Process number of an instance; its first mention names its tracks."""
        pid = self._pids.get(instance)
        if pid is None:
            pid = self._pids[instance] = FIRST_INSTANCE + len(self._pids)
            self._process(pid, f"instance {instance}", {COMMANDS: "commands", PULLS: "pulls"})
        return pid

    def _counters(self, t: float, instance: str, running: int, waiting: int, kv: int) -> None:
        pid = self._pid(instance)
        counts = {"running": running, "waiting": waiting}
        self._event({"ph": "C", "name": "trajectories", "ts": _us(t), "pid": pid, "tid": 0, "args": counts})
        self._event({"ph": "C", "name": "kv", "ts": _us(t), "pid": pid, "tid": 0, "args": {"tokens": kv}})

    # ------------------------------------------------------------------ trajectories and commands

    def _stay(self, line: Line, move: Move) -> None:
        """End the slice of a stay on an instance, begin that of the next one, or both."""
        if move.left:
            args = {"left": move.why}
            if line.get("k") in ("back", "done"):
                args["tokens"] = line["l"]
            self._async("e", move.trajectory_id, move.left, self._stays.pop(move.trajectory_id), args)
        if move.instance:
            self._routes += 1
            self._stays[move.trajectory_id] = self._routes
            args = {"tokens": line["l"], **_reason(line)}
            if "ad" in line:
                args[line["ad"]] = f"V = {line['av']}"
            self._async("b", move.trajectory_id, move.instance, self._routes, args)

    def _async(self, phase: str, name: str, instance: str, number: int, args: dict[str, Any]) -> None:
        event = {"ph": phase, "cat": "trajectory", "name": name, "id": f"{number:x}", "ts": _us(self._now)}
        self._event({**event, "pid": self._pid(instance), "tid": 0, "args": args})

    def _interrupt(self, t: float, line: Line) -> None:
        args = {"trajectory": line["id"], "tokens": line["l"], **_reason(line)}
        self._instant(t, self._pid(line["i"]), "Interrupt", args, COMMANDS)
        if line.get("why", "").startswith("migration"):
            self._instant(t, COORDINATOR, "migration", {"instance": line["i"], **args})

    def _abort(self, t: float, line: Line) -> None:
        args = {"trajectory": line["id"], "tokens": line["l"], **_reason(line)}
        self._instant(t, self._pid(line["i"]), "Abort", args, COMMANDS)

    def _pull(self, t: float, line: Line) -> None:
        self._instant(t, COORDINATOR, f"Pull to {line['i']}", {"version": line["v"], **_reason(line)})

    def _reject(self, t: float, line: Line) -> None:
        what = {"trajectory": line["id"]} if "id" in line else {}
        self._instant(t, self._pid(line["i"]), "refused", {**what, **_reason(line)}, COMMANDS)

    def _release(self, t: float, line: Line) -> None:
        args = {"trajectories": len(line["ids"]), **_reason(line)}
        self._instant(t, COORDINATOR, f"released: {line.get('why', '')}", args)

    def _gave_up(self, t: float, line: Line) -> None:
        self._instant(t, COORDINATOR, "given up", {"trajectory": line["id"], **_reason(line)})

    def _resample(self, t: float, line: Line) -> None:
        args = {"trajectory": line["id"], "to": line["to"], **_reason(line)}
        self._instant(t, COORDINATOR, "resampled", args)

    def _cut(self, t: float, line: Line) -> None:
        self._instant(t, COORDINATOR, "truncated", {"trajectory": line["id"], **_reason(line)})

    # ------------------------------------------------------------------ training

    def _batch(self, t: float, line: Line) -> None:
        step = {"step": line["step"]}
        self._slice(TRAINER, STEPS, f"wait for batch {line['step']}", t - line["s"], t, step)
        self._instant(t, COORDINATOR, f"batch of step {line['step']}", step)

    def _trained(self, t: float, line: Line) -> None:
        step, waits = {"step": line["step"]}, t - line["p"]
        self._slice(TRAINER, STEPS, f"update {line['step']}", waits - line["u"], waits, step)
        if line["p"]:
            version = {"version": line["step"]}
            self._slice(TRAINER, STEPS, f"wait for push {line['step']}", waits, t, version)

    def _push(self, t: float, line: Line) -> None:
        if "s" in line:  # behind the steps
            self._slice(TRAINER, PUSHES, f"push {line['v']}", t - line["s"], t, {"version": line["v"]})

    def _save(self, t: float, line: Line) -> None:
        self._slice(TRAINER, CHECKPOINTS, f"checkpoint {line['v']}", t - line["s"], t, {"version": line["v"]})

    def _eval(self, t: float, line: Line) -> None:
        self._slice(TRAINER, EVALUATIONS, f"evaluate {line['v']}", t - line["s"], t, {"version": line["v"]})

    def _finish(self, t: float, line: Line) -> None:
        self._instant(t, COORDINATOR, f"finished: {line.get('why', '')}", {})

    # ------------------------------------------------------------------ events

    def _process(self, pid: int, name: str, tracks: dict[int, str]) -> None:
        meta = {"ph": "M", "ts": 0, "pid": pid}
        self._event({**meta, "tid": 0, "name": "process_name", "args": {"name": name}})
        self._event({**meta, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}})
        for track, title in tracks.items():
            self._event({**meta, "tid": track, "name": "thread_name", "args": {"name": title}})

    def _instant(self, t: float, pid: int, name: str, args: dict[str, Any], track: int = 0) -> None:
        self._event({"ph": "i", "s": "t", "name": name, "ts": _us(t), "pid": pid, "tid": track, "args": args})

    def _slice(self, pid: int, track: int, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        """A slice that ended at `end`; it begins no earlier than the one before on the track ended.

        Durations are measured where things happen, ends where the loop learned of them.
        """
        began = max(_us(start), self._free_until.get((pid, track), 0), 0)
        ended = max(_us(end), began)
        self._free_until[pid, track] = ended
        event = {"ph": "X", "name": name, "ts": began, "dur": ended - began}
        self._event({**event, "pid": pid, "tid": track, "args": args})

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" if self.events else "")
        self._file.write(json.dumps(event, separators=(",", ":")))
        self.events += 1


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _reason(line: Line) -> dict[str, Any]:
    return {"reason": line["why"]} if "why" in line else {}
