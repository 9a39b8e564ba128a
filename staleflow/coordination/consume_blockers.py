"""What keeps the next batch from being consumed.

Let reserved[k] and occupied[k] be the firm entries of deadline c + k, and B the batch size. Consume takes the
B occupied ones of earliest deadline, and what remains must be placeable from c + 1 on. As all entries are
placeable from c on, that is the case iff

- there are at least B occupied ones, and
- for each k: #{reserved, deadline <= c + k} <= k * B, or at least B occupied ones have such deadlines.

(With fewer than B occupied up to k, all those are taken, and the reserved ones remain for k buffers. With at
least B, a whole batch leaves for the one buffer that goes.) So as long as the batch cannot be consumed, one
of the reserved entries up to the first k that fails, or any if only the first condition does, has to be
finished or to go. Spare entries are not counted and never an obstacle.
"""

from __future__ import annotations

from collections.abc import Sequence


def obstacle(reserved: Sequence[int], occupied: Sequence[int], batch_size: int) -> int | None:
    """Largest k such that a reserved entry of deadline <= c + k has to be finished or to go first.

    None: consume is legal. Both counts are by k = 0..bound.
    """
    waiting = ready = 0
    for k, (some, done) in enumerate(zip(reserved, occupied, strict=True)):
        waiting, ready = waiting + some, ready + done
        if ready < batch_size and waiting > k * batch_size:
            return k
    return None if ready >= batch_size else len(reserved) - 1
