"""The journal file: whole lines or none, told apart by attempt, cheap, and nothing where it is off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.coordination.actions import Abort, Admission, Interrupt, Pull, Route
from staleflow.coordination.events import (
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Rejection,
    TrajectoryReport,
)
from staleflow.errors import RunFolderError
from staleflow.storage import JournalWriter, read_journal
from staleflow.storage.journal import LOADS_PER_S


class Time:
    """Set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict[str, object]]:
    return list(read_journal(path))


def join(journal: JournalWriter, instance: str = "i0", incarnation: int = 1, version: int = 0) -> None:
    journal.joined(
        InstanceJoined(
            instance=instance, incarnation=incarnation, version=version, kv_capacity=100, max_running=4
        )
    )


def report(instance: str = "i0", **changes: object) -> InstanceReport:
    values: dict[str, object] = {
        "instance": instance,
        "incarnation": 1,
        "revision": 1,
        "version": 0,
        "acked_seq": 0,
        **changes,
    }
    return InstanceReport(**values)  # type: ignore[arg-type]


def test_times_count_from_the_beginning_of_the_attempt(tmp_path: Path) -> None:
    clock = Time(100.0)
    journal = JournalWriter(tmp_path / "j", clock=clock, began=99.5, wall=7.0)
    clock.now = 101.25
    journal.pushed(3)
    journal.close()
    assert lines(tmp_path / "j") == [
        {"t": 0.5, "k": "begin", "a": 0, "step": 0, "wall": 7.0},
        {"t": 1.75, "k": "push", "v": 3, "a": 0},
    ]


def test_every_command_is_there_with_what_it_says(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    where = {"instance": 'a "1"', "incarnation": 2}
    journal.command(
        Route(
            **where,  # type: ignore[arg-type]
            seq=1,
            trajectory_id="é",
            group_id="g",
            min_version=3,
            admission=Admission(kind="reserve", version=4, spare=True),
            length=17,
            reason='gain "5"',
        )
    )
    journal.command(Interrupt(**where, seq=2, trajectory_id="x", length=20, reason="migration: load"))  # type: ignore[arg-type]
    journal.command(Abort(**where, seq=3, trajectory_id="x", length=21, reason="surplus member"))  # type: ignore[arg-type]
    journal.command(Pull(**where, seq=4, version=5, reason="unlocks 3"))  # type: ignore[arg-type]
    journal.close()
    head = {"t": 0.0, "i": 'a "1"', "n": 2, "a": 0}
    assert lines(tmp_path / "j")[1:] == [
        {**head, "k": "route", "q": 1, "id": "é", "v": 3, "ad": "reserve", "av": 4, "sp": 1, "l": 17,
         "why": 'gain "5"'},
        {**head, "k": "interrupt", "q": 2, "id": "x", "l": 20, "why": "migration: load"},
        {**head, "k": "abort", "q": 3, "id": "x", "l": 21, "why": "surplus member"},
        {**head, "k": "pull", "q": 4, "v": 5, "why": "unlocks 3"},
    ]  # fmt: skip


def test_a_report_leaves_lines_for_what_is_new_only(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    join(journal)
    first = report(
        acked_seq=3,
        version=2,
        pull_seconds=0.5,
        rejections=(Rejection(seq=2, trajectory_id="b", reason="old", stale_version=True),),
        interrupted=(TrajectoryReport(trajectory_id="c", length=9, min_version=None),),
        finished=(TrajectoryReport(trajectory_id="d", length=12, min_version=0, finish_reason="stop"),),
    )
    journal.reported(first, {"d": ((0, 2), (-1, 3), (2, 1))})
    journal.reported(report(acked_seq=3, version=2, pull_seconds=0.5, revision=2))
    journal.close()
    assert lines(tmp_path / "j")[2:] == [
        {"t": 0.0, "k": "reject", "i": "i0", "n": 1, "q": 2, "id": "b", "why": "old", "stale": 1, "a": 0},
        {"t": 0.0, "k": "back", "i": "i0", "id": "c", "l": 9, "a": 0},
        {"t": 0.0, "k": "done", "i": "i0", "id": "d", "l": 12, "v": 0, "runs": [[0, 2], [-1, 3], [2, 1]],
         "end": "stop", "a": 0},
        {"t": 0.0, "k": "report", "i": "i0", "n": 1, "v": 2, "q": 3, "s": 0.5, "a": 0},
    ]  # fmt: skip


def test_reports_of_an_earlier_incarnation_say_nothing(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    join(journal)
    journal.lost(InstanceLost(instance="i0", incarnation=1, lengths=(("a", 5),), reason="it died"))
    journal.reported(report(acked_seq=1))
    join(journal, incarnation=2)
    journal.reported(report(acked_seq=1))
    journal.reported(report(incarnation=2, acked_seq=1))
    journal.close()
    assert [line["k"] for line in lines(tmp_path / "j")] == ["begin", "join", "lost", "join", "report"]
    assert lines(tmp_path / "j")[2]["back"] == [["a", 5]]


def test_loads_are_sampled_and_an_instance_that_falls_idle_is_seen(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    join(journal)
    for time, running in ((0.0, 1), (0.1, 2), (0.3, 3), (0.4, 4), (0.45, 0), (0.5, 0)):
        clock.now = time
        journal.reported(report(running=running))
    journal.close()
    loads = [(line["t"], line["r"]) for line in lines(tmp_path / "j") if line["k"] == "load"]
    assert loads == [(0.0, 1), (0.3, 3), (0.45, 0)]


def test_many_instances_do_not_make_more_loads_a_second(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    names = [f"i{n}" for n in range(1000)]
    for name in names:
        join(journal, name)
    for turn in range(100):  # ten seconds
        clock.now = turn / 10
        for name in names:
            journal.reported(report(name, running=1 + turn % 3))
    journal.close()
    loads = sum(line["k"] == "load" for line in lines(tmp_path / "j"))
    assert loads <= 10 * LOADS_PER_S


def test_a_journal_cut_at_any_byte_is_read_to_there_and_a_resumed_attempt_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = JournalWriter(path)
    journal.pushed(0)
    journal.scored("a", 0.5, "ok", 0.25)
    journal.close()
    text = path.read_bytes()
    whole_lines = lines(path)
    for cut in range(len(text) + 1):
        path.write_bytes(text[:cut])
        whole = text[:cut].count(b"\n")
        assert lines(path) == whole_lines[:whole]
        again = JournalWriter(path, attempt=1, step=4)
        again.pushed(4)
        again.close()
        assert lines(path)[:whole] == whole_lines[:whole]
        assert [(line["a"], line["k"]) for line in lines(path)[whole:]] == [(1, "begin"), (1, "push")]


def test_what_is_a_second_old_is_in_the_file(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    journal.pushed(0)
    assert (tmp_path / "j").read_bytes() == b""
    clock.now = 1.0
    journal.pushed(1)
    assert len(lines(tmp_path / "j")) == 3
    journal.pushed(2)
    clock.now = 1.9
    journal.flush_if_due()
    assert len(lines(tmp_path / "j")) == 3
    clock.now = 2.0
    journal.flush_if_due()
    assert len(lines(tmp_path / "j")) == 4
    journal.close()
    journal.close()


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    journal = JournalWriter(None)
    assert not journal.is_on
    join(journal)
    journal.reported(report(running=2, acked_seq=1))
    journal.pushed(0)
    journal.flush_if_due()
    journal.close()


def test_a_score_that_is_no_number_reads_back(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    journal.scored("a", float("nan"), "error")
    journal.close()
    raw = lines(tmp_path / "j")[1]["raw"]
    assert raw != raw


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"k":"push"}', '{"t":"x","k":"push"}', "nonsense", '{"k":"begin","t":0}']
)
def test_a_whole_line_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps({"t": 0, "k": "begin", "a": 0}) + f"\n{text}\n")
    with pytest.raises(RunFolderError, match="line 2: not a journal line"):
        lines(path)


def test_a_journal_that_cannot_be_opened_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write the journal"):
        JournalWriter(tmp_path)
    with pytest.raises(RunFolderError, match="cannot read the journal"):
        lines(tmp_path / "none")
