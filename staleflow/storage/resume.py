"""What a ledger says about a run that is to go on from a checkpoint.

Invariant: a prompt use (epoch, prompt) is *used* iff, in the history that the checkpoint continues, its
group was consumed for a step that the checkpoint contains, or was filtered, or failed as a whole (within one
attempt neither is drawn again), before the last such step was
consumed. Everything later is void and is drawn anew, so that over all attempts each prompt of an epoch is
trained or filtered exactly once.

Mechanism: every use is filed under the buffer that was next when it happened (for a consume: its own). Going
back to step N then means forgetting the files of all buffers >= N.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from staleflow.errors import RunFolderError
from staleflow.protocol.records import Consume, Release, Reserve, Resume, Start
from staleflow.storage.ledger import read_ledger

_GROUP_ID = re.compile(r"e(\d+)-p(\d+)-a(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """Where the next attempt begins."""

    step: int
    """The training step it begins with: the checkpoint's weight version."""
    start: Start
    """The constants of the run, from the ledger's first record."""
    used: dict[int, set[int]]
    """Prompt indices used so far, by epoch."""
    attempt: int
    """Number of the next attempt (the first one is 0)."""
    seq: int
    """Sequence number of the next record."""
    group_attempt: int
    """One more than any `a<attempt>` of a group id in the ledger: new group ids from here on are new."""


def resume_state(path: Path, step: int) -> ResumeState | None:
    """Read the ledger at `path` for resuming from the checkpoint of `step`.

    None: it has no whole record, so the run may begin as a new one (and there can be no checkpoint).
    Raises RunFolderError when it has no start, is damaged, or lacks a batch that the checkpoint
    contains.
    """
    start: Start | None = None
    uses: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    next_buffer, newest_attempt, seq, group_attempt = 0, -1, 0, 0

    def go_back(to: int) -> int:
        for buffer in [b for b in uses if b >= to]:
            del uses[buffer]
        return to

    for seq_read, attempt, record in read_ledger(path):
        if seq_read != seq:
            raise RunFolderError(f"{path}: record {seq} is missing, the next one is {seq_read}")
        seq, newest_attempt = seq + 1, attempt
        match record:
            case Start():
                start = record
            case Resume():
                next_buffer = go_back(record.step)
            case Reserve():
                group_attempt = max(group_attempt, _parse(record.group, path)[2] + 1)
            case Release(reason="filtered" | "failed"):
                uses[next_buffer].add(_parse(record.group, path)[:2])
            case Consume():
                uses[record.buffer].update(_parse(g.group, path)[:2] for g in record.groups)
                next_buffer = record.buffer + 1
    if seq == 0 and step == 0:
        return None
    if start is None:
        raise RunFolderError(f"{path}: has no start record, so there is nothing to resume")
    if next_buffer < step:
        raise RunFolderError(f"{path}: ends at step {next_buffer}, before the checkpoint of step {step}")
    go_back(step)
    used: defaultdict[int, set[int]] = defaultdict(set)
    for epoch, prompt in set().union(*uses.values()):
        used[epoch].add(prompt)
    return ResumeState(
        step=step,
        start=start,
        used=dict(used),
        attempt=newest_attempt + 1,
        seq=seq,
        group_attempt=group_attempt,
    )


def _parse(group_id: str, path: Path) -> tuple[int, int, int]:
    """Epoch, prompt index and attempt of a group id."""
    match = _GROUP_ID.fullmatch(group_id)
    if match is None:
        raise RunFolderError(
            f"{path}: group id {group_id!r} is not of the form e<epoch>-p<prompt>-a<attempt>"
        )
    epoch, prompt, attempt = map(int, match.groups())
    return epoch, prompt, attempt
