"""What to do with the last few trajectories that training waits for when nothing else can be started.

Invariants: nothing is done while the trainer has work, while consume is legal, or while another group may
still be reserved; nor while more than `at_most` trajectories are unfinished in the groups waited for. A
trajectory shorter than the mean response is no straggler: one sampled anew would be expected to take longer,
and cutting it would train on a stub. A trajectory is sampled anew at most once.

Cutting long responses off biases what is trained on towards short ones; that is why `wait` is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from staleflow.coordination.consume_blockers import obstacle
from staleflow.coordination.trajectory_table import Member
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.entry import Entry
from staleflow.protocol.lifecycle import TrajectoryState

StragglerAction = Literal["wait", "retry", "truncate"]

UNFINISHED = frozenset({TrajectoryState.PENDING, TrajectoryState.RUNNING, TrajectoryState.WAITING_EXTERNAL})
"""States in which a trajectory is still being generated; one that is being scored needs no help."""
MOVABLE = frozenset({TrajectoryState.PENDING, TrajectoryState.RUNNING})
"""Those in which it can be stopped. An environment has a time limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRule:
    """`coordination.stragglers`."""

    action: StragglerAction = "wait"
    at_most: int = 4
    """Most unfinished trajectories in the groups waited for."""


def waited_for(buffer: StalenessBuffer, unfinished: Callable[[str], int], *, final: bool) -> list[Entry]:
    """The firm groups that training waits for: those that are done soonest of such as consume needs.

    `unfinished` counts the trajectories of a group that are still generated; fewest first, then the earliest
    reserved. `final`: the last batch, which needs every group. Looks at every entry.
    """
    firm = list(buffer.unfinished())
    if final:
        return firm
    reserved, occupied = (list(column) for column in zip(*buffer.by_deadline(), strict=True))
    firm.sort(key=lambda e: (unfinished(e.group), e.order))
    needed: list[Entry] = []
    while (limit := obstacle(reserved, occupied, buffer.batch_size)) is not None:
        entry = next((e for e in firm if e.deadline - buffer.next_buffer <= limit), None)
        if entry is None:
            break
        firm.remove(entry)
        needed.append(entry)
        reserved[entry.deadline - buffer.next_buffer] -= 1
        occupied[entry.deadline - buffer.next_buffer] += 1
    return needed


def stragglers(members: Sequence[Member], rule: StragglerRule, mean_response: int) -> list[Member]:
    """Whom to act upon, among the members of the groups waited for; empty when it is to be waited."""
    if rule.action == "wait":
        return []
    unfinished = [m for m in members if m.state in UNFINISHED]
    if len(unfinished) > rule.at_most:
        return []
    return [
        m
        for m in unfinished
        if m.state in MOVABLE
        and not m.leaving
        and m.length - m.prompt_length >= max(1, mean_response)
        and not (rule.action == "retry" and m.resampled)
    ]
