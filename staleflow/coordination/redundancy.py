"""Which finished spare groups take the places of unfinished firm ones, so that the trainer need not wait.

Rule: nothing is swapped unless the swaps together make consume legal. Out goes, of the firm groups that stand
in the way (`obstacles`), the one with the most left to generate, the latest reserved of equal ones; in comes
the finished spare of the earliest deadline for which the result is placeable. The swapped-out group goes on
as a spare: it is promoted when a place is free again, or expires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from staleflow.coordination.consume_blockers import obstacle
from staleflow.protocol.buffer import StalenessBuffer


class Left(NamedTuple):
    """What a group still has to generate: the more unfinished members, then the fewer tokens, the more."""

    unfinished: int
    """Members that are not generated yet."""
    tokens: int
    """Response tokens that those have."""


def plan_swaps(buffer: StalenessBuffer, left: Callable[[str], Left | None]) -> list[tuple[str, str]]:
    """(spare, firm) pairs to swap in this order; empty when consume would not be legal afterwards.

    `left` says what a firm group has left to generate; None: it must not be swapped out. Looks at every
    entry, so it is for moments at which a spare is finished and the trainer idle.
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
    while (limit := obstacle(reserved, occupied, buffer.batch_size)) is not None:
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
