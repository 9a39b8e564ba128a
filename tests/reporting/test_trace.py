"""trace.json: the Trace Event Format holds, and the slices are those of the journal."""

from __future__ import annotations

import json
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from scripted_run import ScriptedRun, left

from staleflow.coordination.actions import Admission
from staleflow.coordination.events import Rejection
from staleflow.errors import RunFolderError
from staleflow.reporting.trace import trace_run, write_trace

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """Events of a trace, checked against the Trace Event Format."""
    document = json.loads(path.read_text())
    events: list[Event] = document["traceEvents"]
    newest: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    open_: dict[str, Event] = {}
    for event in events:
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "MCXibe"
        assert event["name"]
        track = (event["pid"], event["tid"], "nested" if event["ph"] in "be" else event["ph"] + event["name"])
        if event["ph"] == "X":
            track = (event["pid"], event["tid"], "X")
            assert event["dur"] >= 0
        assert event["ts"] >= newest[track], "out of order on its track"
        newest[track] = event["ts"] + (event["dur"] if event["ph"] == "X" else 0)
        if event["ph"] == "i":
            assert event["s"] in "tpg"
        if event["ph"] == "b":
            assert event["id"] not in open_
            open_[event["id"]] = event
        if event["ph"] == "e":
            began = open_.pop(event["id"])
            assert all(began[k] == event[k] for k in ("cat", "name", "pid"))
    assert open_ == {}
    return events


def named(events: list[Event], phase: str, name: str = "") -> list[Event]:
    return [e for e in events if e["ph"] == phase and e["name"].startswith(name)]


@pytest.fixture
def run(tmp_path: Path) -> ScriptedRun:
    run = ScriptedRun(tmp_path)
    run.at(1.0)
    run.journal.pushed(0)
    run.join("i0")
    run.join("i1")
    run.draw("g", 4)
    run.route("i0", 1, "g-m0", admission=Admission(kind="reserve", version=0), reason="gain 80")
    run.route("i0", 2, "g-m1")
    run.route("i0", 3, "g-m2")
    run.route("i1", 1, "g-m3")
    run.at(2.0)
    run.report("i0", 3, running=2, waiting=1, kv_tokens=31,
               rejections=(Rejection(seq=3, trajectory_id="g-m2", reason="full"),))  # fmt: skip
    run.at(3.0)
    run.interrupt("i0", 4, "g-m0", length=12, reason="migration: 1 waits")
    run.pull("i0", 5, version=1, reason="unlocks 3")
    run.at(3.5)
    run.report("i0", 5, version=1, interrupted=(left("g-m0", 13, 0),), pull_seconds=0.25)
    run.at(4.0)
    run.report("i0", 5, version=1, finished=(left("g-m1", 20, 0, "stop"),), pull_seconds=0.25)
    run.abort("i1", 2, "g-m3", length=11, reason="surplus member")
    run.route("i1", 3, "g-m0", length=13)
    run.at(5.0)
    run.consume(0, ("g", 0), waited=4.0)
    run.at(7.0)
    run.trained(0, update_s=1.5, waited_s=0.25, push_s=0.5)
    run.journal.saved(1, 0.5)
    run.journal.evaluated(1, 3.0)
    return run


def test_slices_and_instants_are_those_of_the_journal(run: ScriptedRun) -> None:
    run.close()
    output = run.folder / "trace.json"
    count = trace_run(run.folder, output)
    events = load(output)
    assert len(events) == count
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "coordinator", 2: "trainer", 3: "instance i0", 4: "instance i1"}
    slices = {e["name"]: (e["pid"], e["ts"], e["dur"]) for e in named(events, "X")}
    assert slices == {
        "pull of version 1": (3, 3_250_000, 250_000),
        "wait for batch 0": (2, 1_000_000, 4_000_000),
        "update 0": (2, 5_250_000, 1_500_000),
        "wait for push 0": (2, 6_750_000, 250_000),
        "push 0": (2, 1_000_000, 0),
        "push 1": (2, 6_500_000, 500_000),
        "checkpoint 1": (2, 6_500_000, 500_000),
        "evaluate 1": (2, 4_000_000, 3_000_000),
    }
    stays = {}
    for began in named(events, "b"):
        (ended,) = [e for e in named(events, "e") if e["id"] == began["id"]]
        stays[began["name"], began["pid"]] = (began["ts"], ended["ts"], ended["args"]["left"])
    assert stays == {
        ("g-m0", 3): (1_000_000, 3_500_000, "interrupted"),
        ("g-m1", 3): (1_000_000, 4_000_000, "stop"),
        ("g-m2", 3): (1_000_000, 2_000_000, "refused"),
        ("g-m3", 4): (1_000_000, 4_000_000, "aborted"),
        ("g-m0", 4): (4_000_000, 7_000_000, "the end"),
    }
    (first, *_) = named(events, "b", "g-m0")
    assert first["args"] == {"tokens": 10, "reason": "gain 80", "reserve": "V = 0"}
    (interrupt,) = named(events, "i", "Interrupt")
    assert (interrupt["pid"], interrupt["args"]["reason"]) == (3, "migration: 1 waits")
    (migration,) = named(events, "i", "migration")
    assert (migration["pid"], migration["args"]["instance"]) == (1, "i0")
    (pull,) = named(events, "i", "Pull")
    assert (pull["pid"], pull["args"]) == (1, {"version": 1, "reason": "unlocks 3"})
    (abort,) = named(events, "i", "Abort")
    assert (abort["pid"], abort["args"]["reason"]) == (4, "surplus member")
    counters = [(e["pid"], e["ts"], e["args"]) for e in named(events, "C")]
    assert counters[:2] == [
        (3, 2_000_000, {"running": 2, "waiting": 1}),
        (3, 2_000_000, {"tokens": 31}),
    ]


def test_a_lost_instance_and_a_killed_attempt_leave_nothing_open(run: ScriptedRun) -> None:
    run.at(8.0)
    run.lose("i1", (("g-m0", 15),), "killed")
    run.route("i0", 6, "g-m0", length=15)
    run.resume(0)
    run.at(0.5)
    run.join("i0", incarnation=1)
    run.route("i0", 1, "g2-m0")
    run.close()
    with (run.folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"t":0.6,"k":"rou')  # torn
    trace_run(run.folder, run.folder / "trace.json")
    events = load(run.folder / "trace.json")
    ended = [(e["name"], e["ts"], e["args"]["left"]) for e in named(events, "e")]
    assert ended[-3:] == [
        ("g-m0", 8_000_000, "lost"),
        ("g-m0", 8_000_000, "the end"),
        ("g2-m0", 9_500_000, "the end"),
    ]
    (again,) = named(events, "i", "attempt 1")
    assert again["ts"] == 9_000_000  # a second after what is known of the first


def test_durations_longer_than_the_time_that_the_loop_saw_do_not_overlap(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path)
    run.join("i0")
    for turn in range(1, 4):
        run.at(turn * 0.1)
        run.report("i0", turn, version=turn, pull_seconds=turn * 0.3)
    run.close()
    trace_run(tmp_path, tmp_path / "trace.json")
    assert [(e["ts"], e["dur"]) for e in named(load(tmp_path / "trace.json"), "X")] == [
        (0, 100_000),
        (100_000, 100_000),
        (200_000, 100_000),
    ]


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    def peak(trajectories: int) -> int:
        folder = tmp_path / str(trajectories)
        folder.mkdir()
        run = ScriptedRun(folder)
        run.join("i0")
        for n in range(trajectories):
            run.at(float(n))
            run.route("i0", n + 1, f"g{n}-m0")
            run.report("i0", n + 1, finished=(left(f"g{n}-m0", 20, 0, "stop"),))
        run.close()
        tracemalloc.start()
        write_trace(folder / "journal.jsonl", folder / "trace.json")
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(10)  # what is imported or cached once
    assert peak(4000) < peak(400) + 50_000


def test_nothing_is_written_over_or_left_behind(run: ScriptedRun) -> None:
    run.close()
    (run.folder / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"notes\.txt exists and is not a JSON file"):
        trace_run(run.folder, run.folder / "notes.txt")
    with pytest.raises(RunFolderError, match=r"has no journal\.jsonl"):
        trace_run(run.folder / "..", run.folder / "trace.json")
    with pytest.raises(RunFolderError, match="cannot write the trace"):
        trace_run(run.folder, run.folder / "none" / "trace.json")
    (run.folder / "journal.jsonl").write_text("nonsense\n")
    with pytest.raises(RunFolderError, match="line 1"):
        trace_run(run.folder, run.folder / "trace.json")
    assert {p.name for p in run.folder.iterdir()} == {"journal.jsonl", "ledger.jsonl", "notes.txt"}
