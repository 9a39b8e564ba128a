"""Whatever the paper's slot rules admit, the counting form admits, and it is never stuck where they are not.

The two may take different occupied groups into a batch, so from then on they hold different occupied
groups, but always the same reserved ones: all transitions but consume are about those and apply to both.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.protocol import BufferState, StalenessBuffer


class SlotModel:
    """The paper's rules, literally: buffers of `batch_size` slots, each entry in one of them.

    Reserve in the latest admissible buffer with an empty slot; occupy moves to the earliest empty slot, and
    the vacated slot is refilled by the first reserved entry that may sit there; consume takes the next
    buffer when all its slots are occupied.
    """

    def __init__(self, bound, batch_size):
        self.bound, self.batch_size, self.c = bound, batch_size, 0
        self.slot = {}
        """Group -> V_buf."""
        self.version = {}
        self.occupied = set()

    def empty(self, last):
        """Buffers with an empty slot, up to `last`."""
        held = list(self.slot.values())
        buffers = range(self.c, min(last, self.c + self.bound) + 1)
        return [buffer for buffer in buffers if held.count(buffer) < self.batch_size]

    def can_reserve(self, version):
        return bool(self.empty(version + self.bound))

    def reserve(self, group, version):
        self.slot[group] = self.empty(version + self.bound)[-1]
        self.version[group] = version

    def can_lower(self, group, version):
        return self.slot[group] <= version + self.bound or bool(self.empty(version + self.bound))

    def lower(self, group, version):
        if self.slot[group] > version + self.bound:
            self.slot[group] = self.empty(version + self.bound)[-1]
        self.version[group] = version

    def occupy(self, group):
        self.occupied.add(group)
        vacated = self.slot[group]
        earlier = self.empty(vacated - 1)
        if not earlier:
            return
        self.slot[group] = earlier[0]
        for other, buffer in sorted(self.slot.items(), key=lambda item: item[1]):
            may_sit = self.version[other] + self.bound >= vacated
            if other not in self.occupied and buffer < vacated and may_sit:
                self.slot[other] = vacated
                return

    def release(self, group):
        del self.slot[group], self.version[group]

    def can_consume(self):
        return sum(self.slot[group] == self.c for group in self.occupied) == self.batch_size

    def consume(self):
        for group in [g for g in self.occupied if self.slot[g] == self.c]:
            assert self.version[group] + self.bound >= self.c
            self.occupied.discard(group)
            self.release(group)
        self.c += 1

    @property
    def reserved(self):
        return [group for group in self.slot if group not in self.occupied]


moves = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "reserve", "lower", "occupy", "occupy", "release", "consume"]),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=120,
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), moves)
def test_the_counting_form_admits_whatever_the_slot_rules_admit(bound, batch_size, moves):
    slots = SlotModel(bound, batch_size)
    buffer = StalenessBuffer(bound=bound, batch_size=batch_size)
    for number, (move, pick, back) in enumerate(moves):
        version = max(0, slots.c - back)
        group = slots.reserved[pick % len(slots.reserved)] if slots.reserved else None
        if move == "reserve" and slots.can_reserve(version):
            assert buffer.can_reserve(version)
            slots.reserve(f"g{number}", version)
            buffer.reserve(f"g{number}", version)
        elif move == "lower" and group:
            lower = slots.version[group] - back
            if lower >= 0 and slots.can_lower(group, lower):
                assert buffer.can_lower(group, lower)
                slots.lower(group, lower)
                buffer.lower(group, lower)
        elif move in ("occupy", "release") and group:
            getattr(slots, move)(group)
            getattr(buffer, move)(group)
        elif move == "consume" and slots.can_consume():
            assert buffer.can_consume()
            slots.consume()
            buffer.consume()
        if slots.can_consume() or slots.can_reserve(slots.c):
            assert buffer.state() != BufferState.STUCK
        assert set(slots.reserved) == {g for g in buffer.groups() if not buffer.entry(g).occupied}
