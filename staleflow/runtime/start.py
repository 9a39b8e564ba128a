"""Where an attempt of a run begins (at version 0, or at a checkpoint), and where it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from staleflow.protocol.records import Record, Resume, Start
from staleflow.storage.resume import resume_state
from staleflow.training.checkpoints import newest_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Everything that tells a first attempt from a later one."""

    opening: Record
    """The record that begins the attempt: Start, or Resume."""
    step: int = 0
    """The first training step = weight version at the start."""
    attempt: int = 0
    next_seq: int = 0
    """Number of the next ledger record."""
    group_attempt: int = 0
    """The `a` of group ids made in this attempt."""
    used: dict[int, set[int]] = field(default_factory=dict)
    """Prompt indices used, by epoch."""
    checkpoint: Path | None = None


def first_start(opening: Start) -> StartPoint:
    """A run that has done nothing yet."""
    return StartPoint(opening=opening)


def resumed_start(opening: Start, ledger: Path, checkpoints: Path) -> StartPoint:
    """Go on from the newest whole checkpoint; without one, from version 0 with all work void.

    `opening` is used when the earlier attempt died before its first record. Raises RunFolderError when
    ledger and checkpoint do not fit together.
    """
    found = newest_whole(checkpoints)
    step, checkpoint = found if found is not None else (0, None)
    state = resume_state(ledger, step) if ledger.exists() else None
    if state is None:
        return first_start(opening)
    return StartPoint(
        opening=Resume(step=step),
        step=step,
        attempt=state.attempt,
        next_seq=state.seq,
        group_attempt=state.group_attempt,
        used=state.used,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where an attempt writes."""

    name: str
    ledger: Path
    checkpoints: Path
    logs: Path
    journal: Path | None = None
    """None: telemetry.journal is off."""
