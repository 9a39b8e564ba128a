"""What keeps the next batch from being consumed, and two remedies: swap in spares, act on stragglers.

*Blockers.* Let reserved[k] and occupied[k] be the firm entries of deadline c + k, and B the batch size.
Consume takes the B occupied ones of earliest deadline, and what remains must be placeable from c + 1 on.
Since all entries are placeable from c on, consume is legal iff

- there are at least B occupied ones, and
- for each k: #{reserved, deadline <= c + k} <= k * B, or at least B occupied ones have such deadlines.

(With fewer than B occupied up to k, all of those are taken, and the reserved ones keep k buffers. With at
least B, a whole batch leaves for the one buffer that is lost.) So while consume is illegal, one of the
reserved entries up to the first k that fails, or any reserved entry if only the first condition fails, must
be finished or removed. Spare entries are not counted and never block.

*Swaps.* Nothing is swapped unless the swaps together make consume legal. The group swapped out is, among the
blocking firm groups, the one with most left to generate (the latest reserved on a tie); the group swapped in
is the finished spare of the earliest deadline for which the result is placeable. The swapped-out group
continues as a spare: it is promoted when a place becomes free, or expires.

*Stragglers.* Invariants: nothing is done while the trainer has work, while consume is legal, while another
group may still be reserved, or while more than `at_most` trajectories are unfinished in the groups waited
for. A trajectory shorter than the mean response is not a straggler: a new sample would be expected to take
longer, and cutting it would train on a stub. A trajectory is sampled anew at most once. Cutting long
responses biases training towards short ones; that is why `wait` is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from staleflow.coordination.trajectory_table import Member
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.entry import Entry
from staleflow.protocol.lifecycle import TrajectoryState

StragglerAction = Literal["wait", "retry", "truncate"]

UNFINISHED = frozenset({TrajectoryState.PENDING, TrajectoryState.RUNNING, TrajectoryState.WAITING_EXTERNAL})
"""States in which a trajectory is still being generated. A trajectory being scored needs no help."""
MOVABLE = frozenset({TrajectoryState.PENDING, TrajectoryState.RUNNING})
"""States in which it can be stopped. An environment has its own time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRule:
    """`coordination.stragglers`."""

    action: StragglerAction = "wait"
    at_most: int = 4
    """Most unfinished trajectories in the groups waited for."""


def last_blocking_offset(reserved: Sequence[int], occupied: Sequence[int], batch_size: int) -> int | None:
    """Largest k such that a reserved entry of deadline <= c + k must first be finished or removed.

    None: consume is legal. Both counts are indexed by k = 0..bound.
    """
    waiting = ready = 0
    for k, (some, done) in enumerate(zip(reserved, occupied, strict=True)):
        waiting, ready = waiting + some, ready + done
        if ready < batch_size and waiting > k * batch_size:
            return k
    return None if ready >= batch_size else len(reserved) - 1


# ---------------------------------------------------------------------- swaps


class Left(NamedTuple):
    """What a group has left to generate: more unfinished members mean more, then fewer tokens."""

    unfinished: int
    """Members not generated yet."""
    tokens: int
    """Response tokens they have so far."""


def plan_swaps(buffer: StalenessBuffer, left: Callable[[str], Left | None]) -> list[tuple[str, str]]:
    """(spare, firm) pairs to swap, in this order; empty if consume would stay illegal.

    `left` gives what a firm group has left to generate; None: it must not be swapped out. O(entries), so call
    it only when a spare is finished and the trainer idle.
    """
    reserved, occupied = (list(column) for column in zip(*buffer.by_deadline(), strict=True))
    done = sorted((e for e in buffer.spares() if e.occupied), key=lambda e: (e.deadline, e.order))
    enough = sum(occupied) + len(done) >= buffer.batch_size
    if not done or not enough or buffer.can_consume():
        return []
    sized = [
        (size.unfinished, -size.tokens, e.order, e)
        for e in buffer.unfinished()
        if (size := left(e.group)) is not None
    ]
    firm = [entry for *_, entry in sorted(sized, key=lambda item: item[:3], reverse=True)]
    counts, first = buffer.counts(), buffer.next_buffer
    swaps: list[tuple[str, str]] = []
    while (limit := last_blocking_offset(reserved, occupied, buffer.batch_size)) is not None:
        pair = next(
            (
                (new, old)
                for old in firm
                if old.deadline <= first + limit
                for new in done
                if counts.can_move(old.version, new.version)
            ),
            None,
        )
        if pair is None:
            return []
        new, old = pair
        counts.move(old.version, new.version)
        reserved[old.deadline - first] -= 1
        occupied[new.deadline - first] += 1
        done.remove(new)
        firm.remove(old)
        swaps.append((new.group, old.group))
    return swaps


# ---------------------------------------------------------------------- stragglers


def waited_for(buffer: StalenessBuffer, unfinished: Callable[[str], int], *, final: bool) -> list[Entry]:
    """The firm groups that training waits for: of those that consume could need, the ones done soonest.

    `unfinished` counts the trajectories of a group still being generated; fewest first, then earliest
    reserved. `final`: the last batch, which needs every group. O(entries).
    """
    firm = list(buffer.unfinished())
    if final:
        return firm
    reserved, occupied = (list(column) for column in zip(*buffer.by_deadline(), strict=True))
    firm.sort(key=lambda e: (unfinished(e.group), e.order))
    needed: list[Entry] = []
    while (limit := last_blocking_offset(reserved, occupied, buffer.batch_size)) is not None:
        entry = next((e for e in firm if e.deadline - buffer.next_buffer <= limit), None)
        if entry is None:
            break
        firm.remove(entry)
        needed.append(entry)
        reserved[entry.deadline - buffer.next_buffer] -= 1
        occupied[entry.deadline - buffer.next_buffer] += 1
    return needed


def stragglers(members: Sequence[Member], rule: StragglerRule, mean_response: int) -> list[Member]:
    """The members to act on among those of the groups waited for; empty while waiting is right."""
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
