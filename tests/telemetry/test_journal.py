"""The journal file: whole lines or none, told apart by attempt, cheap, and nothing where it is off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_events import Time, batch, received, report, response, scored, teller

from staleflow.coordination.actions import Abort, Admission, Interrupt, Pull, Route
from staleflow.coordination.events import (
    DrawnGroup,
    GroupsDrawn,
    InstanceJoined,
    InstanceLost,
    Rejection,
    TrajectoryReport,
    TurnGiven,
    WaitingExternal,
)
from staleflow.data.trajectory import FAILED, Reward
from staleflow.errors import RunFolderError
from staleflow.storage import read_journal
from staleflow.telemetry.events import (
    CheckpointSaved,
    CommandSent,
    Evaluated,
    GivenUp,
    LoopClosed,
    RecordAppended,
    Released,
    RewardReceived,
    RunFinished,
    StepTrained,
    StragglerResampled,
    StragglerTruncated,
    TurnEnded,
    WeightsPushed,
)
from staleflow.telemetry.journal import LOADS_PER_S, JournalWriter


def lines(path: Path) -> list[dict[str, object]]:
    return list(read_journal(path))


def join(instance: str = "i0", incarnation: int = 1, version: int = 0) -> InstanceJoined:
    return InstanceJoined(
        instance=instance, incarnation=incarnation, version=version, kv_capacity=100, max_running=4
    )


def push(version: int) -> WeightsPushed:
    return WeightsPushed(version=version, seconds=0.5)


def test_times_count_from_the_beginning_of_the_attempt(tmp_path: Path) -> None:
    clock = Time(100.0)
    journal = JournalWriter(tmp_path / "j", clock=clock, began=99.5, wall=7.0)
    tell = teller(journal)
    clock.now = 101.25
    tell(push(3))
    journal.close()
    assert lines(tmp_path / "j") == [
        {"t": 0.5, "k": "begin", "a": 0, "step": 0, "wall": 7.0},
        {"t": 1.75, "k": "push", "v": 3, "s": 0.5, "a": 0},
    ]


def test_every_command_is_there_with_what_it_says(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    tell = teller(journal)
    where = {"instance": 'a "1"', "incarnation": 2}
    tell(
        CommandSent(
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
    )
    tell(CommandSent(Interrupt(**where, seq=2, trajectory_id="x", length=20, reason="migration: load")))  # type: ignore[arg-type]
    tell(CommandSent(Abort(**where, seq=3, trajectory_id="x", length=21, reason="surplus member")))  # type: ignore[arg-type]
    tell(CommandSent(Pull(**where, seq=4, version=5, reason="unlocks 3")))  # type: ignore[arg-type]
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
    tell = teller(journal)
    tell(join())
    first = report(
        acked_seq=3,
        version=2,
        pull_seconds=0.5,
        rejections=(Rejection(seq=2, trajectory_id="b", reason="old", stale_version=True),),
        interrupted=(TrajectoryReport(trajectory_id="c", length=9, min_version=None),),
        finished=(TrajectoryReport(trajectory_id="d", length=12, min_version=0, finish_reason="stop"),),
    )
    tell(received(first, runs={"d": ((0, 2), (-1, 3), (2, 1))}))
    tell(received(report(acked_seq=3, version=2, pull_seconds=0.5, revision=2)))
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
    tell = teller(journal)
    tell(join())
    tell(InstanceLost(instance="i0", incarnation=1, lengths=(("a", 5),), reason="it died"))
    tell(received(report(acked_seq=1)))
    tell(join(incarnation=2))
    tell(received(report(acked_seq=1)))
    tell(received(report(incarnation=2, acked_seq=1)))
    journal.close()
    assert [line["k"] for line in lines(tmp_path / "j")] == ["begin", "join", "lost", "join", "report"]
    assert lines(tmp_path / "j")[2]["back"] == [["a", 5]]


def test_loads_are_sampled_and_an_instance_that_falls_idle_is_seen(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    tell = teller(journal)
    tell(join())
    for time, running in ((0.0, 1), (0.1, 2), (0.3, 3), (0.4, 4), (0.45, 0), (0.5, 0)):
        clock.now = time
        tell(received(report(running=running)))
    journal.close()
    loads = [(line["t"], line["r"]) for line in lines(tmp_path / "j") if line["k"] == "load"]
    assert loads == [(0.0, 1), (0.3, 3), (0.45, 0)]


def test_many_instances_do_not_make_more_loads_a_second(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    tell = teller(journal)
    names = [f"i{n}" for n in range(1000)]
    for name in names:
        tell(join(name))
    for turn in range(100):  # ten seconds
        clock.now = turn / 10
        for name in names:
            tell(received(report(name, running=1 + turn % 3)))
    journal.close()
    loads = sum(line["k"] == "load" for line in lines(tmp_path / "j"))
    assert loads <= 10 * LOADS_PER_S


def test_a_journal_cut_at_any_byte_is_read_to_there_and_a_resumed_attempt_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = JournalWriter(path)
    tell = teller(journal)
    tell(push(0))
    tell(RewardReceived("a", Reward(raw=0.5, seconds=0.25), False))
    journal.close()
    text = path.read_bytes()
    whole_lines = lines(path)
    for cut in range(len(text) + 1):
        path.write_bytes(text[:cut])
        whole = text[:cut].count(b"\n")
        assert lines(path) == whole_lines[:whole]
        again = JournalWriter(path, attempt=1, step=4)
        tell = teller(again)
        tell(push(4))
        again.close()
        assert lines(path)[:whole] == whole_lines[:whole]
        assert [(line["a"], line["k"]) for line in lines(path)[whole:]] == [(1, "begin"), (1, "push")]


def test_what_is_a_second_old_is_in_the_file(tmp_path: Path) -> None:
    clock = Time(0.0)
    journal = JournalWriter(tmp_path / "j", clock=clock)
    tell = teller(journal)
    tell(push(0))
    assert (tmp_path / "j").read_bytes() == b""
    clock.now = 1.0
    tell(push(1))
    assert len(lines(tmp_path / "j")) == 3
    tell(push(2))
    clock.now = 1.9
    tell(TurnEnded(False))
    assert len(lines(tmp_path / "j")) == 3
    clock.now = 2.0
    tell(TurnEnded(False))
    assert len(lines(tmp_path / "j")) == 4
    journal.close()


def test_when_the_loop_is_closed_all_is_in_the_file(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    tell = teller(journal)
    tell(push(0))
    tell(LoopClosed())
    assert [line["k"] for line in lines(tmp_path / "j")] == ["begin", "push"]
    journal.close()


def test_without_a_path_it_listens_to_nothing() -> None:
    journal = JournalWriter(None)
    assert journal.handlers() == {}
    journal.close()


def test_what_happens_to_trajectories_and_batches_has_a_line_each(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    tell = teller(journal)
    drawn = DrawnGroup(group_id="g", members=("a", "b", "c"), prompt_length=3)
    happened = (
        GroupsDrawn(groups=(drawn,)),
        WaitingExternal(trajectory_id="a", limit_s=30.0),
        TurnGiven(trajectory_id="a", length=12),
        RewardReceived("a", Reward(raw=1.0, seconds=0.125), False),
        RewardReceived("gone", Reward(raw=1.0), True),
        RewardReceived("b", FAILED, False),
        GivenUp(trajectory_id="b", reason="it stalled"),
        Released((), "filtered"),
        Released((response(id_="b"), response(id_="c")), "aborted"),
        StragglerResampled(dropped=response(id_="c"), new_id="d", reason="too long"),
        StragglerTruncated(trajectory=response(id_="a"), reason="too long"),
        RecordAppended(17),
        batch([scored(response())], step=4, waited_s=1.5),
        StepTrained(step=4, trained=(), metrics={}, update_s=2.0, waited_s=0.25),
        StepTrained(step=5, trained=(), metrics={}, update_s=2.0),
        Evaluated(version=5, seconds=3.0),
        CheckpointSaved(version=5, seconds=0.75),
        RunFinished(reason="completed"),
    )
    for event in happened:
        tell(event)
    journal.close()
    assert [{k: v for k, v in line.items() if k not in ("t", "a")} for line in lines(tmp_path / "j")[1:]] == [
        {"k": "draw", "g": "g", "m": ["a", "b", "c"], "l": 3},
        {"k": "external", "id": "a", "s": 30},
        {"k": "given", "id": "a", "l": 12},
        {"k": "score", "id": "a", "raw": 1.0, "st": "ok", "s": 0.125},
        {"k": "score", "id": "b", "raw": 0.0, "st": "failed", "s": 0.0},
        {"k": "gave_up", "id": "b", "why": "it stalled"},
        {"k": "release", "ids": ["b", "c"], "why": "aborted"},
        {"k": "resample", "id": "c", "to": "d", "why": "too long"},
        {"k": "cut", "id": "a", "why": "too long"},
        {"k": "ledger", "q": 17},
        {"k": "batch", "step": 4, "s": 1.5},
        {"k": "trained", "step": 4, "u": 2.0, "p": 0.25},
        {"k": "trained", "step": 5, "u": 2.0, "p": 0.0},
        {"k": "eval", "v": 5, "s": 3.0},
        {"k": "save", "v": 5, "s": 0.75},
        {"k": "finish", "why": "completed"},
    ]


def test_a_score_that_is_no_number_reads_back(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    tell = teller(journal)
    tell(RewardReceived("a", Reward(raw=float("nan"), status="error"), False))
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
