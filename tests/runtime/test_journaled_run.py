"""Whole runs and their journal: it agrees with the ledger and the rows, and explains every trajectory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy import ToyRun, toy_config

from staleflow.data.schedule import PromptSchedule
from staleflow.protocol.records import Consume, Occupy, Reserve, Trained
from staleflow.reporting.explain import explain
from staleflow.reporting.trace import trace_run
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine, FakeScript
from staleflow.rollout.scripted_lengths import long_tailed
from staleflow.runtime.assembly import build_inline_loop, build_monitor
from staleflow.runtime.start import RunPaths
from staleflow.storage import read_journal, read_ledger

Line = dict[str, Any]


def journal(run: ToyRun) -> list[Line]:
    return list(read_journal(run.journal))


def rows(run: ToyRun, kind: str) -> list[dict[str, Any]]:
    return [row.values for row in run.monitor.take_rows() if row.kind == kind]


def engines(script: FakeScript) -> Any:
    """Makes engines; the first incarnation of i0 follows the script."""

    def make(instance: str, incarnation: int) -> FakeEngine:
        return FakeEngine(
            sampling=SamplingParams(stop_token_ids=(1,), max_model_len=256),
            seed=0,
            version=-1,
            vocab_size=14,
            kv_capacity_tokens=8192,
            max_running=8,
            lengths=long_tailed(12, 1.0, 24, seed=0),
            script=script if (instance, incarnation) == ("i0", 1) else FakeScript(),
        )

    return make


@pytest.fixture
def run(model: Path, tmp_path: Path) -> ToyRun:
    run = ToyRun(toy_config(model, tmp_path, "staleness.bound=2", "run.steps=5"), tmp_path)
    assert run.run() == "completed"
    return run


def test_an_update_lasts_from_its_batch_to_its_push(run: ToyRun) -> None:
    """On the virtual clock too, where computing takes no time."""
    handed_out = {line["step"]: line["t"] for line in journal(run) if line["k"] == "batch"}
    trained = [line for line in journal(run) if line["k"] == "trained"]
    assert [line["u"] for line in trained] == pytest.approx([t["t"] - handed_out[t["step"]] for t in trained])
    assert all(line["u"] > 0 for line in trained)


def test_every_record_has_its_time_and_times_never_fall(run: ToyRun) -> None:
    lines = journal(run)
    numbers = [seq for seq, _, _ in read_ledger(run.ledger)]
    assert [line["q"] for line in lines if line["k"] == "ledger"] == numbers
    times = [line["t"] for line in lines]
    assert times == sorted(times)


def test_commands_and_batches_are_as_many_as_the_rows_say(run: ToyRun) -> None:
    kinds = Counter(line["k"] for line in journal(run))
    all_rows = run.monitor.take_rows()
    summary: dict[str, Any]
    (summary,) = [row.values for row in all_rows if row.kind == "summary"]
    train: list[dict[str, Any]] = [row.values for row in all_rows if row.kind == "train"]
    for kind in ("route", "interrupt", "abort", "pull"):
        assert kinds[kind] == summary[f"coord/{kind}_count"]
    assert kinds["batch"] == kinds["trained"] == len(train) == 5
    waits = [line["s"] for line in journal(run) if line["k"] == "batch"]
    assert waits == pytest.approx([row["timing_s/wait_for_batch"] for row in train], abs=1e-6)
    assert sum(row["coord/route_count"] for row in train) <= summary["coord/route_count"]
    (first, *_) = [row.values for row in all_rows if row.kind == "instances"]
    assert {"instance/i0/preemptions", "instance/i1/preemptions"} <= first.keys()


def test_every_trajectory_has_a_life_that_ends_as_the_ledger_says(run: ToyRun) -> None:
    trained = {
        member.id: record.step
        for _, _, record in read_ledger(run.ledger)
        if isinstance(record, Trained)
        for member in record.trajectories
    }
    drawn = [member for line in journal(run) if line["k"] == "draw" for member in line["m"]]
    folder = run.ledger.parent
    for trajectory_id in drawn[::5]:
        text = explain(folder, trajectory_id)
        if trajectory_id in trained:
            assert f"trained in step {trained[trajectory_id]} with staleness" in text
        else:
            assert "summary: released: " in text
    for step in range(5):
        assert f"verdict: step {step} " in explain(folder, f"step {step}")
    count = trace_run(folder, folder / "trace.json")
    assert len(json.loads((folder / "trace.json").read_text())["traceEvents"]) == count


def test_generated_tokens_are_told_by_version(run: ToyRun) -> None:
    """What an instance reported as done is, version by version, what the trainer saw."""
    seen = {
        member.id: (member.min, member.max, member.tokens)
        for _, _, record in read_ledger(run.ledger)
        if isinstance(record, Trained)
        for member in record.trajectories
    }
    done = {line["id"]: line["runs"] for line in journal(run) if line["k"] == "done"}
    assert seen
    for trajectory_id, (low, high, tokens) in seen.items():
        runs = done[trajectory_id]
        assert (min(v for v, _ in runs), max(v for v, _ in runs)) == (low, high)
        assert sum(n for _, n in runs) == tokens


def test_the_same_run_leaves_the_same_journal(model: Path, tmp_path: Path) -> None:
    """All but the time that scoring takes, which is real."""
    told = []
    for name in ("one", "two"):
        run = ToyRun(toy_config(model, tmp_path, "run.steps=3"), tmp_path / name)
        run.run()
        told.append([{**line, "s": 0} if line["k"] == "score" else line for line in journal(run)])
    assert told[0] == told[1]


def test_a_trajectory_whose_instance_broke_goes_on_elsewhere(model: Path, tmp_path: Path) -> None:
    run = ToyRun(toy_config(model, tmp_path), tmp_path, make_engine=engines(FakeScript(fail_at_step=9)))
    assert run.run() == "completed"
    (lost,) = [line for line in journal(run) if line["k"] == "lost"]
    assert lost["i"] == "i0"
    trajectory_id, length = lost["back"][0]
    lines = explain(tmp_path, trajectory_id).splitlines()
    texts = [line[14:] for line in lines[1:-1]]
    at = texts.index(
        f"i0 was lost (scripted failure at step 9): returned to the trajectory server with {length} tokens"
    )
    assert texts[at - 1].startswith(("routed to i0", "accepted by i0"))
    assert texts[at + 1].startswith(("routed to i1", "routed to i0"))
    assert any(text.startswith("finished on ") for text in texts)


def test_a_trajectory_that_stalls_is_taken_back_and_given_up_at_last(model: Path, tmp_path: Path) -> None:
    """F15: each try and its end are told."""
    _, index = next(iter(PromptSchedule(64, seed=0)))
    victim = f"e0-p{index}-a0-m1"
    frozen = engines(FakeScript(freeze=frozenset({victim})))
    config = toy_config(
        model,
        tmp_path,
        "rollout.instances=1",
        "rollout.lost_after_s=2",
        "rollout.progress_interval_s=0.5",
        "rollout.max_retries=2",
        "training.dynamic_sampling=false",
    )
    run = ToyRun(config, tmp_path, make_engine=frozen)
    assert run.run() == "completed"
    texts = [line[14:] for line in explain(tmp_path, victim).splitlines()]
    stall = "Interrupt sent to i0: no new token for 2 s on i0"
    assert texts.count(stall) == 3
    assert f"given up, and masked in training: {stall.partition(': ')[2]}" in texts
    assert "scored 0 (failed), 0.00 s after it finished" in texts
    assert any(text.startswith("masked in step ") for text in texts)


def test_with_the_journal_off_nothing_is_written_and_the_run_is_the_same(
    model: Path, tmp_path: Path, run: ToyRun
) -> None:
    from staleflow.runtime.assembly import read_data
    from staleflow.runtime.clock import VirtualClock
    from staleflow.runtime.start import first_start

    folder = tmp_path / "off"
    (folder / "checkpoints").mkdir(parents=True)
    paths = RunPaths(
        name="toy", ledger=folder / "ledger.jsonl", checkpoints=folder / "checkpoints", logs=folder
    )
    clock = VirtualClock()
    (_, _, opening), *_ = read_ledger(run.ledger)
    loop = build_inline_loop(
        run.config,
        read_data(run.config),
        first_start(opening),  # type: ignore[arg-type]
        paths,
        monitor=build_monitor(run.config, paths, clock),
        clock=clock,
    )
    assert loop.run() == "completed"
    assert (folder / "ledger.jsonl").read_bytes() == run.ledger.read_bytes()
    assert not (folder / "journal.jsonl").exists()


def test_records_come_before_what_follows_from_them(run: ToyRun) -> None:
    """A reservation before the route that needs it; completion after the last score; batch after consume."""
    records = {seq: record for seq, _, record in read_ledger(run.ledger)}
    reserved: set[str] = set()
    scored: Counter[str] = Counter()
    consumed = -1
    for line in journal(run):
        record = records.get(line["q"]) if line["k"] == "ledger" else None
        match record:
            case Reserve():
                reserved.add(record.group)
            case Occupy():
                assert scored[record.group] == 3
            case Consume():
                consumed = record.buffer
        if line["k"] == "route":
            assert line["id"].rpartition("-m")[0] in reserved
        if line["k"] == "score":
            scored[line["id"].rpartition("-m")[0]] += 1
        if line["k"] == "batch":
            assert line["step"] == consumed
