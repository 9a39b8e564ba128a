"""The ledger file survives a kill at any byte, and resuming from it loses and repeats nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from staleflow.errors import RunFolderError
from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    End,
    Occupy,
    Record,
    Release,
    Reserve,
    Resume,
    Start,
)
from staleflow.storage import LedgerWriter, read_ledger, resume_state

START = Start(bound=1, batch_size=2, group_size=2, last_batch="train", spare_limit=0)


def write(path: Path, *records: Record) -> None:
    with LedgerWriter(path) as ledger:
        for seq, record in enumerate(records):
            ledger.append(record, seq, 0)


def reserve(group: str) -> Reserve:
    return Reserve(group=group, version=0, spare=False)


def consume(buffer: int, *groups: str) -> Consume:
    taken = tuple(ConsumedGroup(group=g, version=buffer, ids=(), hashes=()) for g in groups)
    return Consume(buffer=buffer, final=False, groups=taken)


def test_records_read_back_in_order(tmp_path: Path) -> None:
    records = [
        START,
        reserve("e0-p3-a0"),
        Occupy(group="e0-p3-a0"),
        consume(0, "e0-p3-a0"),
        End(steps=1, reason="completed"),
    ]
    write(tmp_path / "ledger.jsonl", *records)
    assert list(read_ledger(tmp_path / "ledger.jsonl")) == [(i, 0, r) for i, r in enumerate(records)]


def test_a_ledger_cut_at_any_byte_reads_as_its_whole_lines_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    records = [START, reserve("e0-p3-a0"), Occupy(group="e0-p3-a0"), consume(0, "e0-p3-a0")]
    write(path, *records)
    text = path.read_bytes()
    for cut in range(len(text) + 1):
        path.write_bytes(text[:cut])
        whole = text[:cut].count(b"\n")
        assert [r for _, _, r in read_ledger(path)] == records[:whole]
        with LedgerWriter(path) as ledger:
            ledger.append(Resume(step=0), whole, 1)
        assert [r for _, _, r in read_ledger(path)] == [*records[:whole], Resume(step=0)]


def test_a_torn_tail_longer_than_any_buffer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, START)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    LedgerWriter(path).close()
    assert path.read_bytes() == whole


def test_a_damaged_line_inside_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, START, reserve("e0-p0-a0"))
    path.write_bytes(path.read_bytes().replace(b'"start"', b'"stort"'))
    with pytest.raises(RunFolderError, match=r"ledger.jsonl, line 1: not a ledger record"):
        list(read_ledger(path))
    with pytest.raises(RunFolderError, match="cannot read the ledger"):
        list(read_ledger(tmp_path / "none"))
    with pytest.raises(RunFolderError, match="cannot write the ledger"):
        LedgerWriter(tmp_path / "none" / "ledger.jsonl")


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from staleflow.storage import LedgerWriter\nfrom staleflow.protocol.records import Occupy\n"
        "ledger = LedgerWriter(Path(sys.argv[1]))\n"
        "for seq in range(1000):\n    ledger.append(Occupy(group=str(seq)), seq, 0)\n"
        "ledger.flush()\n"
        "ledger.append(Occupy(group='lost'), 1000, 0)\n"
        "print('flushed', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "flushed\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert [r for _, _, r in read_ledger(path)] == [Occupy(group=str(seq)) for seq in range(1000)]


def test_consumed_prompts_count_as_used_and_unfinished_ones_do_not(tmp_path: Path) -> None:
    """F20: prompts 0..3 were generated, 0 and 1 trained; 2 and 3 must be drawn again."""
    path = tmp_path / "ledger.jsonl"
    groups = [f"e0-p{p}-a0" for p in range(4)]
    write(path, START, *map(reserve, groups), *[Occupy(group=g) for g in groups], consume(0, *groups[:2]))
    state = resume_state(path, 1)
    assert state is not None
    assert (state.used, state.attempt, state.seq, state.group_attempt) == ({0: {0, 1}}, 1, 10, 1)
    assert state.start == START


def test_batches_after_the_checkpoint_are_void(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, START, consume(0, "e0-p0-a0"), consume(1, "e0-p1-a0"), consume(2, "e1-p0-a0"))
    used = {step: resume_state(path, step) for step in range(4)}
    assert [s.used for s in used.values() if s] == [{}, {0: {0}}, {0: {0, 1}}, {0: {0, 1}, 1: {0}}]


def test_a_filtered_prompt_is_used_when_the_checkpoint_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    # A group that failed as a whole is not drawn again within an attempt, so neither is it after a resume.
    filtered = [Release(group="e0-p7-a0", reason="failed"), Release(group="e0-p8-a0", reason="filtered")]
    aborted = Release(group="e0-p9-a0", reason="aborted")
    write(path, START, filtered[0], aborted, consume(0, "e0-p0-a0"), filtered[1])
    state = resume_state(path, 1)
    assert state is not None
    assert state.used == {0: {0, 7}}


def test_an_earlier_resume_voids_what_it_went_back_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, START, consume(0, "e0-p0-a0"), consume(1, "e0-p1-a0"), Resume(step=1), consume(1, "e0-p2-a3"))
    state = resume_state(path, 2)
    assert state is not None
    assert state.used == {0: {0, 2}}


def test_a_ledger_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"seq":0,"attem')
    assert resume_state(path, 0) is None
    with pytest.raises(RunFolderError, match="no start record"):
        resume_state(path, 1)
    write(path, START, consume(0, "e0-p0-a0"))
    with pytest.raises(RunFolderError, match="ends at step 1, but the checkpoint is of step 2"):
        resume_state(path, 2)
    path.write_bytes(path.read_bytes().replace(b'{"seq":1', b'{"seq":2'))
    with pytest.raises(RunFolderError, match="record 1 is missing; record 2 follows instead"):
        resume_state(path, 1)
    write(tmp_path / "odd", START, reserve("group-7"))
    with pytest.raises(RunFolderError, match="'group-7' does not have the form"):
        resume_state(tmp_path / "odd", 0)


class TinyRun:
    """A run of the ledger alone: every prompt of every epoch in batches of two, some filtered, some ahead."""

    def __init__(self, path: Path, prompts: int, epochs: int, rng: random.Random) -> None:
        self._path, self._prompts, self._epochs, self._rng = path, prompts, epochs, rng

    def attempt(self, step: int) -> None:
        """Run to the end from the checkpoint of `step`."""
        state = resume_state(self._path, step) if self._path.exists() else None
        used = state.used if state else {}
        a = state.group_attempt if state else 0
        uses = [(e, p) for e in range(self._epochs) for p in range(self._prompts) if p not in used.get(e, ())]
        ids = [f"e{e}-p{p}-a{a}" for e, p in uses]
        with LedgerWriter(self._path) as ledger:
            seq, attempt = (state.seq, state.attempt) if state else (0, 0)
            for record in [Resume(step=step) if state else START, *self._records(ids, step)]:
                ledger.append(record, seq, attempt)
                seq += 1

    def _records(self, ids: list[str], step: int) -> list[Record]:
        records: list[Record] = []
        batch: list[str] = []
        for index, group in enumerate(ids):
            # Two groups ahead of the one that is finished, as a run with staleness has them.
            records += [reserve(g) for g in (ids[:3] if index == 0 else ids[index + 2 : index + 3])]
            if self._rng.random() < 0.2:
                records.append(Release(group=group, reason="filtered"))
                continue
            records.append(Occupy(group=group))
            batch.append(group)
            if len(batch) == 2:
                records.append(consume(step, *batch))
                batch, step = [], step + 1
        return [*records, consume(step, *batch)] if batch else records


@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_bytes_neither_skip_nor_repeat_a_prompt_use(tmp_path: Path, seed: int) -> None:
    """F19, F23: the multiset of trained and filtered uses over five kills is data set × epochs."""
    rng = random.Random(seed)
    path = tmp_path / "ledger.jsonl"
    run = TinyRun(path, prompts=7, epochs=2, rng=rng)
    run.attempt(0)
    for _ in range(5):
        text = path.read_bytes()
        last_attempt = [
            line
            for line in text.splitlines(keepends=True)
            if b'"kind":"resume"' in line or b'"kind":"start"' in line
        ][-1]
        begins = text.rindex(last_attempt) + len(last_attempt)
        path.write_bytes(text[: rng.randint(begins, len(text))])
        trained = 0
        for _, _, record in read_ledger(path):
            if isinstance(record, Resume):
                trained = record.step
            elif isinstance(record, Consume):
                trained = record.buffer + 1
        run.attempt(rng.randint(max(0, trained - 2), trained))
    final: dict[int, list[str]] = {}
    step = 0
    for _, _, record in read_ledger(path):
        if isinstance(record, Resume):
            step = record.step
            final = {buffer: groups for buffer, groups in final.items() if buffer < step}
        elif isinstance(record, Release):
            final.setdefault(step, []).append(record.group)
        elif isinstance(record, Consume):
            final.setdefault(step, []).extend(g.group for g in record.groups)
            step = record.buffer + 1
    uses = Counter(group.rpartition("-a")[0] for groups in final.values() for group in groups)
    assert uses == Counter(f"e{e}-p{p}" for e in range(2) for p in range(7))
