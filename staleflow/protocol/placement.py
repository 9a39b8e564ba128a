"""How many groups may still be admitted: Hall's condition for the virtual staleness buffers.

Invariant: all entries counted here can be placed, each in a buffer `V_buf` in `[next_buffer, d]`, with at
most `batch_size` per buffer, where `d = V + bound` is an entry's deadline. That is the case iff

    slack[k] = (k + 1) * batch_size - #{entries with d <= next_buffer + k} >= 0    for k = 0 .. bound

(Hall's condition for intervals that all begin at `next_buffer`; earliest-deadline-first is then a placement).
So the slacks are stored instead of the counts: one more entry at offset k decrements `slack[k]` and all later
ones, and it fits iff none of those was zero. Offset k stands for the deadline `next_buffer + k`, that is, the
version `next_buffer - bound + k`. Every operation is O(bound).
"""

from __future__ import annotations

from collections.abc import Sequence

from staleflow.errors import ProtocolError


class DeadlineCounts:
    """Counts of firm entries by deadline. The buffer and the coordinator's speculation both use it."""

    __slots__ = ("_oldest", "_slack", "batch_size", "bound", "next_buffer")

    def __init__(
        self, *, bound: int, batch_size: int, next_buffer: int = 0, counts: Sequence[int] = ()
    ) -> None:
        """`counts` are entries by offset 0..bound, as `as_tuple` gives them; empty means none.

        Raises ValueError when a constant is out of range or the counts are not placeable.
        """
        if bound < 0 or batch_size < 1 or next_buffer < 0:
            raise ValueError(
                f"need bound >= 0, batch_size >= 1 and next_buffer >= 0, "
                f"not {bound}, {batch_size} and {next_buffer}"
            )
        if len(counts) not in (0, bound + 1) or any(count < 0 for count in counts):
            raise ValueError(f"need {bound + 1} counts, none below 0, not {tuple(counts)}")
        self.bound = bound
        self.batch_size = batch_size
        self.next_buffer = next_buffer
        self._oldest = next_buffer - bound
        """Version whose deadline is next_buffer; negative near the start."""
        self._slack = []
        slack = 0
        for offset in range(bound + 1):
            slack += batch_size - (counts[offset] if counts else 0)
            self._slack.append(slack)
        if min(self._slack) < 0:
            raise ValueError(f"counts {tuple(counts)} are not placeable in batches of {batch_size}")

    def can_add(self, version: int) -> bool:
        """Whether one more entry of this version fits."""
        offset = version - self._oldest
        return 0 <= offset <= self.bound and version >= 0 and 0 not in self._slack[offset:]

    def room(self, version: int) -> int:
        """How many more entries of this version fit."""
        offset = version - self._oldest
        if not 0 <= offset <= self.bound or version < 0:
            return 0
        return min(self._slack[offset:])

    def add(self, version: int) -> None:
        """Count one more entry. Raises ProtocolError if it does not fit."""
        slack = self._slack
        offset = version - self._oldest
        if not 0 <= offset <= self.bound or version < 0 or 0 in slack[offset:]:
            raise ProtocolError(f"no place for a group of version {version}: {self}")
        for k in range(offset, self.bound + 1):
            slack[k] -= 1

    def can_move(self, old_version: int, new_version: int) -> bool:
        """Whether an entry counted at the old version may be counted at the new one."""
        old, new = old_version - self._oldest, new_version - self._oldest
        if new_version < 0 or not 0 <= new <= self.bound or not self._has(old):
            return False
        return 0 not in self._slack[new:old]

    def move(self, old_version: int, new_version: int) -> None:
        """Count an entry at another version. Raises ProtocolError if that is not placeable."""
        if not self.can_move(old_version, new_version):
            raise ProtocolError(f"no group can move from version {old_version} to {new_version}: {self}")
        old, new = old_version - self._oldest, new_version - self._oldest
        for k in range(new, old):
            self._slack[k] -= 1
        for k in range(old, new):
            self._slack[k] += 1

    def remove(self, version: int) -> None:
        """Count one entry less. Raises ProtocolError if none of this version is counted."""
        offset = version - self._oldest
        if not self._has(offset):
            raise ProtocolError(f"no group of version {version} to remove: {self}")
        for k in range(offset, self.bound + 1):
            self._slack[k] += 1

    def can_advance(self, taken: Sequence[int]) -> bool:
        """Whether the batch of next_buffer may take `taken[k]` entries at each offset k.

        What remains must be placeable from next_buffer + 1 on: all of offset 0 is taken, and the rest loses
        one buffer of `batch_size` places and the `taken` entries.
        """
        loss, before = self.batch_size, 0
        for slack, count in zip(self._slack, taken, strict=True):
            loss -= count
            if slack < loss or not 0 <= count <= self.batch_size - slack + before:
                return False
            before = slack
        return loss >= 0

    def advance(self, taken: Sequence[int]) -> None:
        """Take a batch and advance to the next buffer. Raises ProtocolError if `can_advance` is false."""
        if not self.can_advance(taken):
            raise ProtocolError(f"taking {tuple(taken)} leaves groups that cannot be placed: {self}")
        slack, loss = [], self.batch_size
        for before, count in zip(self._slack, taken, strict=True):
            loss -= count
            slack.append(before - loss)
        self._slack = [*slack[1:], slack[-1] + self.batch_size]
        self.next_buffer += 1
        self._oldest += 1

    def copy(self) -> DeadlineCounts:
        """An independent copy."""
        twin = DeadlineCounts.__new__(DeadlineCounts)
        twin.bound, twin.batch_size, twin.next_buffer = self.bound, self.batch_size, self.next_buffer
        twin._oldest, twin._slack = self._oldest, self._slack.copy()
        return twin

    def as_tuple(self) -> tuple[int, ...]:
        """Entries with deadline next_buffer + k, for k = 0..bound."""
        before = [0, *self._slack]
        return tuple(self.batch_size - b + a for a, b in zip(before, self._slack, strict=False))

    @property
    def total(self) -> int:
        """All entries counted; at most (bound + 1) * batch_size."""
        return (self.bound + 1) * self.batch_size - self._slack[-1]

    def _has(self, offset: int) -> bool:
        if not 0 <= offset <= self.bound:
            return False
        slack = self._slack
        return self.batch_size - slack[offset] + (slack[offset - 1] if offset else 0) > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeadlineCounts):
            return NotImplemented
        return (self.bound, self.batch_size, self.next_buffer, self._slack) == (
            other.bound,
            other.batch_size,
            other.next_buffer,
            other._slack,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"DeadlineCounts(bound={self.bound}, batch_size={self.batch_size}, "
            f"next_buffer={self.next_buffer}, counts={self.as_tuple()})"
        )
