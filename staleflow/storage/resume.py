"""The state of a run at a checkpoint, reconstructed from its ledger.

Invariant: a prompt use (epoch, prompt) is *used* iff, in the history that the checkpoint continues, its
group was consumed for a step that the checkpoint contains, or, before the last such step was consumed, was
filtered or failed as a whole (within one attempt neither is drawn again). Everything later is void and is
drawn again, so that over all attempts each prompt of an epoch is trained or filtered exactly once.

Mechanism: every use is stored under the buffer that was next at the time (a consume: under its own). Going
back to step N removes the uses of all buffers >= N.
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
    """The start of the next attempt."""

    step: int
    """Its first training step: the checkpoint's weight version."""
    start: Start
    """The constants of the run, from the ledger's first record."""
    used: dict[int, set[int]]
    """Prompt indices used so far, by epoch."""
    attempt: int
    """Number of the next attempt (the first one is 0)."""
    seq: int
    """Sequence number of the next record."""
    group_attempt: int
    """One more than any `a<attempt>` of a group id in the ledger, so that new group ids are unique."""


def resume_state(path: Path, step: int) -> ResumeState | None:
    """Read the ledger at `path` for resuming from the checkpoint of `step`.

    None: it has no whole record (so no checkpoint can exist), and the run may start as a new one.
    Raises RunFolderError if the ledger has no start record, is damaged, or lacks a batch that the checkpoint
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
            raise RunFolderError(f"{path}: record {seq} is missing; record {seq_read} follows instead")
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
        raise RunFolderError(f"{path}: ends at step {next_buffer}, but the checkpoint is of step {step}")
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
            f"{path}: group id {group_id!r} does not have the form e<epoch>-p<prompt>-a<attempt>"
        )
    epoch, prompt, attempt = map(int, match.groups())
    return epoch, prompt, attempt
