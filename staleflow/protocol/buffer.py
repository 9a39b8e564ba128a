"""The virtual staleness buffer: which groups may be generated, and which are trained on next.

Rule: a group whose oldest weight version is V is trained on in a buffer V_buf with

    V + bound >= V_buf,

*and a firm entry never has to be dropped to keep that bound*: it is admitted only if it can be placed (the
condition of `placement`), and a transition that would leave a firm entry without a place is illegal.

Entries are *firm* (counted) or *spare* (redundant, at most `spare_limit`, not counted, dropped when their
deadline d = V + bound is past). Both kinds are *reserved* until all their kept members are rewarded, then
*occupied*. c is `next_buffer`. Versions are 0..c: while step s is trained on, the newest is s and c = s + 1.

    ===========  ==================================================  =======================================
    transition   legal iff                                           effect
    ===========  ==================================================  =======================================
    reserve      group is new, V <= c, d >= c; firm: still           a reserved entry
                 placeable; spare: fewer than spare_limit
    lower        reserved, V' <= V, V' + bound >= c; firm: still     V becomes V'; V never rises
                 placeable
    occupy       reserved                                            occupied
    release      reserved, or spare                                  gone
    promote      spare; firm and spare together placeable            firm
    swap         an occupied spare for a reserved firm entry; the    the two change places
                 result placeable
    consume      batch_size occupied firm entries; what remains      those of earliest deadline, then of
                 placeable from c + 1                                earliest reservation leave; c + 1;
                                                                     spares with d < c expire
    final        the caller knows that no prompts are left;          as consume, of min(batch_size, n)
    consume      every entry occupied, at least one firm             entries
    ===========  ==================================================  =======================================

Anything else raises ProtocolError and changes nothing. Each transition costs O(bound) or O(log n).

Bound. Placeable means that no firm entry has d < c. Consume takes buffer c, so V + bound = d >= c.

Capacity. Placeable means at most (bound + 1) * batch_size firm entries, as d <= c + bound.

Liveness. Let the trainer be idle, so that the newest version is v = c, and let all n firm entries be
occupied.

- n >= batch_size: taking the earliest deadlines leaves, of those with d <= s,
  max(0, #{d <= s} - batch_size) <= (s - c) * batch_size entries for each s >= c: nothing with d = c, and
  placeable from c + 1 on. So consume is legal.
- n < batch_size: one more entry of V = c has d = c + bound, and it is the last in deadline order, so all
  stay placeable because n + 1 <= batch_size <= (bound + 1) * batch_size. So reserve is legal.

Hence training continues as long as each reserved entry is eventually occupied or released and rollout
instances can reach the newest version. Spares are not counted, so they never block.
"""

from __future__ import annotations

from heapq import heappop, heappush

from staleflow.errors import ProtocolError
from staleflow.protocol.entry import BufferState, Consumed, Entry, Live
from staleflow.protocol.placement import DeadlineCounts


class StalenessBuffer:
    """The state machine of the module's docstring. Not thread-safe: it has a single writer."""

    __slots__ = ("_counts", "_entries", "_occupied", "_order", "_ready", "_spares", "spare_limit")

    def __init__(self, *, bound: int, batch_size: int, spare_limit: int = 0, next_buffer: int = 0) -> None:
        """An empty buffer. `next_buffer` > 0 resumes a run. Raises ValueError for constants out of range."""
        if spare_limit < 0:
            raise ValueError(f"need spare_limit >= 0, not {spare_limit}")
        self.spare_limit = spare_limit
        self._counts = DeadlineCounts(bound=bound, batch_size=batch_size, next_buffer=next_buffer)
        self._entries: dict[str, Live] = {}
        self._order = 0
        self._occupied = 0
        """Occupied entries, firm and spare."""
        self._ready: list[list[tuple[int, Live]]] = [[] for _ in range(bound + 1)]
        """Occupied firm entries by offset of their deadline, each a heap by order. They leave only by
        consume, so a heap never holds a removed entry."""
        self._spares: list[dict[str, Live]] = [{} for _ in range(bound + 1)]
        """Spare entries by offset of their deadline."""

    @property
    def bound(self) -> int:
        """Staleness bound, in weight versions."""
        return self._counts.bound

    @property
    def batch_size(self) -> int:
        """Groups per training step."""
        return self._counts.batch_size

    @property
    def next_buffer(self) -> int:
        """The training step whose batch is consumed next."""
        return self._counts.next_buffer

    # Reserved entries ---------------------------------------------------------------------------------

    def can_reserve(self, version: int, spare: bool = False) -> bool:
        """Whether a new group may start at this version."""
        if spare:
            return self.spare_count < self.spare_limit and self._in_time(version)
        return self._counts.can_add(version)

    def reserve(self, group: str, version: int, spare: bool = False) -> None:
        """A new group starts at this version."""
        if group in self._entries:
            raise ProtocolError(f"group {group} is already reserved")
        if spare:
            if not self.can_reserve(version, spare=True):
                raise ProtocolError(
                    f"no spare place for group {group} of version {version}: {self.spare_count} of "
                    f"{self.spare_limit} taken, versions {self._oldest()}..{self.next_buffer} admissible"
                )
            live = Live(group, version, True, self._order)
            self._spares_of(version)[group] = live
        else:
            self._counts.add(version)
            live = Live(group, version, False, self._order)
        self._entries[group] = live
        self._order += 1

    def can_lower(self, group: str, version: int) -> bool:
        """Whether a member of the group may start on this version, which is at most the group's."""
        live = self._entries.get(group)
        if live is None or live.occupied or version > live.version:
            return False
        if live.spare:
            return self._in_time(version)
        return self._counts.can_move(live.version, version)

    def lower(self, group: str, version: int) -> None:
        """A member of the group starts on this version; no effect if it equals the group's."""
        if not self.can_lower(group, version):
            raise ProtocolError(f"group {group} cannot be lowered to version {version}: {self._show(group)}")
        live = self._entries[group]
        if live.spare:
            del self._spares_of(live.version)[group]
            self._spares_of(version)[group] = live
        else:
            self._counts.move(live.version, version)
        live.version = version

    def occupy(self, group: str) -> None:
        """All kept members of the group are rewarded."""
        live = self._entries.get(group)
        if live is None or live.occupied:
            raise ProtocolError(f"group {group} cannot be occupied: {self._show(group)}")
        live.occupied = True
        self._occupied += 1
        if not live.spare:
            self._make_ready(live)

    def release(self, group: str) -> None:
        """The group leaves untrained. Illegal for an occupied firm entry."""
        live = self._entries.get(group)
        if live is None or (live.occupied and not live.spare):
            raise ProtocolError(f"group {group} cannot be released: {self._show(group)}")
        if live.spare:
            del self._spares_of(live.version)[group]
            self._occupied -= live.occupied
        else:
            self._counts.remove(live.version)
        del self._entries[group]

    # Consume ------------------------------------------------------------------------------------------

    def can_consume(self, final: bool = False) -> bool:
        """Whether the batch of `next_buffer` may be taken. `final`: the caller has no prompt left."""
        return self._batch(final) is not None

    def consume(self, final: bool = False) -> Consumed:
        """Take the batch of `next_buffer` and advance to the next buffer."""
        taken = self._batch(final)
        if taken is None:
            raise ProtocolError(
                f"buffer {self.next_buffer} cannot be consumed{' as the final one' if final else ''}: "
                f"{self._occupied} of {len(self)} entries occupied, {self._counts}"
            )
        buffer, bound = self.next_buffer, self.bound
        entries = []
        for ready, count in zip(self._ready, taken, strict=True):
            for _ in range(count):
                live = heappop(ready)[1]
                del self._entries[live.group]
                entries.append(live.entry(bound))
        self._occupied -= len(entries)
        self._counts.advance(taken)
        self._ready = [*self._ready[1:], self._ready[0]]
        expired = self._spares[0]
        self._spares = [*self._spares[1:], {}]
        for group, live in expired.items():
            self._occupied -= live.occupied
            del self._entries[group]
        return Consumed(buffer=buffer, entries=tuple(entries), expired=tuple(expired))

    # Spares -------------------------------------------------------------------------------------------

    def can_promote(self, group: str) -> bool:
        """Whether the spare entry may become firm."""
        live = self._entries.get(group)
        return live is not None and live.spare and self._counts.can_add(live.version)

    def promote(self, group: str) -> None:
        """The spare entry becomes firm."""
        if not self.can_promote(group):
            raise ProtocolError(f"group {group} cannot be promoted: {self._show(group)}")
        live = self._entries[group]
        self._counts.add(live.version)
        self._make_firm(live)

    def can_swap(self, spare: str, firm: str) -> bool:
        """Whether the finished spare entry may replace the unfinished firm one."""
        new, old = self._entries.get(spare), self._entries.get(firm)
        if new is None or old is None or not new.spare or not new.occupied or old.spare or old.occupied:
            return False
        return self._counts.can_move(old.version, new.version)

    def swap(self, spare: str, firm: str) -> None:
        """The finished spare entry becomes firm, the unfinished firm one spare."""
        if not self.can_swap(spare, firm):
            raise ProtocolError(
                f"group {spare} cannot be swapped for {firm}: {self._show(spare)}, {self._show(firm)}"
            )
        new, old = self._entries[spare], self._entries[firm]
        self._counts.move(old.version, new.version)
        self._make_firm(new)
        old.spare = True
        self._spares_of(old.version)[firm] = old

    # Reading ------------------------------------------------------------------------------------------

    def entry(self, group: str) -> Entry:
        """The group's entry. Raises ProtocolError if it has none."""
        live = self._entries.get(group)
        if live is None:
            raise ProtocolError(self._show(group))
        return live.entry(self.bound)

    def groups(self) -> tuple[str, ...]:
        """All groups in the buffer, in reservation order."""
        return tuple(self._entries)

    def __contains__(self, group: object) -> bool:
        return group in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def firm_count(self) -> int:
        """Number of firm entries."""
        return self._counts.total

    @property
    def spare_count(self) -> int:
        """Number of spare entries."""
        return sum(map(len, self._spares))

    def spares(self) -> tuple[Entry, ...]:
        """Spare entries, in reservation order."""
        live = [live for spares in self._spares for live in spares.values()]
        return tuple(one.entry(self.bound) for one in sorted(live, key=lambda one: one.order))

    def unfinished(self) -> tuple[Entry, ...]:
        """Firm entries that are not occupied, in reservation order. O(entries)."""
        return tuple(
            live.entry(self.bound) for live in self._entries.values() if not live.spare and not live.occupied
        )

    def by_deadline(self) -> tuple[tuple[int, int], ...]:
        """(reserved, occupied) firm entries of deadline next_buffer + k, for k = 0..bound."""
        counts = zip(self._counts.as_tuple(), map(len, self._ready), strict=True)
        return tuple((count - ready, ready) for count, ready in counts)

    def counts(self) -> DeadlineCounts:
        """An independent copy of the counts of firm entries, for speculation."""
        return self._counts.copy()

    def state(self) -> BufferState:
        """What the next buffer waits for; meaningful while the trainer is idle."""
        if self.can_consume():
            return BufferState.READY
        if self.can_reserve(self.next_buffer):
            return BufferState.WAITING
        return BufferState.STUCK

    def placement(self) -> tuple[tuple[int, int], ...]:
        """(reserved, occupied) firm entries of buffer next_buffer + k for k = 0..bound.

        The placement is earliest deadline first; within one deadline, occupied first.
        """
        size = self.batch_size
        buffers = [[0, 0] for _ in range(self.bound + 1)]
        at = 0
        for count, ready in zip(self._counts.as_tuple(), self._ready, strict=True):
            for kind, left in ((1, len(ready)), (0, count - len(ready))):
                while left:
                    part = min(left, size - at % size)
                    buffers[at // size][kind] += part
                    at, left = at + part, left - part
        return tuple((reserved, occupied) for reserved, occupied in buffers)

    # Internals ----------------------------------------------------------------------------------------

    def _batch(self, final: bool) -> list[int] | None:
        """Number of occupied firm entries that consume takes from each offset; None if it is illegal."""
        if self._occupied < (len(self._entries) if final else self.batch_size):
            return None
        need, taken = self.batch_size, []
        for ready in self._ready:
            count = min(len(ready), need)
            need -= count
            taken.append(count)
        if need and not (final and need < self.batch_size):
            return None
        return taken if self._counts.can_advance(taken) else None

    def _oldest(self) -> int:
        return max(0, self.next_buffer - self.bound)

    def _in_time(self, version: int) -> bool:
        return self._oldest() <= version <= self.next_buffer

    def _spares_of(self, version: int) -> dict[str, Live]:
        return self._spares[version + self.bound - self.next_buffer]

    def _make_firm(self, live: Live) -> None:
        del self._spares_of(live.version)[live.group]
        live.spare = False
        if live.occupied:
            self._make_ready(live)

    def _make_ready(self, live: Live) -> None:
        counts = self._counts
        heappush(self._ready[live.version + counts.bound - counts.next_buffer], (live.order, live))

    def _show(self, group: str) -> str:
        live = self._entries.get(group)
        return f"group {group} has no entry" if live is None else f"it is {live.entry(self.bound)}"
