"""The staleness buffer against an oracle that keeps a plain list and sorts it anew for every question."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from staleflow.errors import ProtocolError
from staleflow.protocol import BufferState, StalenessBuffer


class Oracle:
    """The protocol in the words of the design, by exhaustive means. An entry is a dict."""

    def __init__(self, bound, batch_size, spare_limit, next_buffer):
        self.bound, self.batch_size, self.spare_limit = bound, batch_size, spare_limit
        self.c = next_buffer
        self.entries = []

    def find(self, group):
        return next((e for e in self.entries if e["group"] == group), None)

    def firm(self):
        return [e for e in self.entries if not e["spare"]]

    def placeable(self, firm, c=None):
        """Earliest deadline first, one entry after another into the first buffer with a free place."""
        c = self.c if c is None else c
        places = [buffer for buffer in range(c, c + self.bound + 1) for _ in range(self.batch_size)]
        for entry in sorted(firm, key=lambda e: e["version"]):
            if not places or places.pop(0) > entry["version"] + self.bound:
                return False
        return True

    def exists(self, version):
        return 0 <= version <= self.c and version + self.bound >= self.c

    def may_reserve(self, group, version, spare):
        if self.find(group) or not self.exists(version):
            return False
        if spare:
            return sum(e["spare"] for e in self.entries) < self.spare_limit
        return self.placeable([*self.firm(), {"version": version}])

    def may_lower(self, group, version):
        entry = self.find(group)
        if not entry or entry["occupied"] or version > entry["version"] or not self.exists(version):
            return False
        others = [e for e in self.firm() if e is not entry]
        return entry["spare"] or self.placeable([*others, {"version": version}])

    def may_release(self, group):
        entry = self.find(group)
        return bool(entry) and (entry["spare"] or not entry["occupied"])

    def may_promote(self, group):
        entry = self.find(group)
        return bool(entry) and entry["spare"] and self.placeable([*self.firm(), entry])

    def may_swap(self, spare, firm):
        new, old = self.find(spare), self.find(firm)
        if not new or not old or not new["spare"] or not new["occupied"] or old["spare"] or old["occupied"]:
            return False
        return self.placeable([*(e for e in self.firm() if e is not old), new])

    def batch(self, final):
        ready = [e for e in self.firm() if e["occupied"]]
        batch = sorted(ready, key=lambda e: (e["version"], e["order"]))[: self.batch_size]
        rest = [e for e in self.firm() if e not in batch]
        if final and (not batch or not all(e["occupied"] for e in self.entries)):
            return None
        if not final and len(batch) < self.batch_size:
            return None
        return batch if self.placeable(rest, self.c + 1) else None

    def consume(self, batch):
        self.entries = [e for e in self.entries if e not in batch]
        self.c += 1
        expired = [e["group"] for e in self.entries if e["spare"] and e["version"] + self.bound < self.c]
        self.entries = [e for e in self.entries if e["group"] not in expired]
        return expired


groups = st.integers(0, 9).map(lambda n: f"g{n}")
offsets = st.integers(-1, 4)


class Protocol(RuleBasedStateMachine):
    """Draws legal and illegal transitions alike; the buffer must tell them apart as the oracle does."""

    @initialize(
        bound=st.integers(0, 3),
        batch_size=st.integers(1, 3),
        spare_limit=st.integers(0, 2),
        next_buffer=st.integers(0, 4),
    )
    def start(self, bound, batch_size, spare_limit, next_buffer):
        self.oracle = Oracle(bound, batch_size, spare_limit, next_buffer)
        self.buffer = StalenessBuffer(
            bound=bound, batch_size=batch_size, spare_limit=spare_limit, next_buffer=next_buffer
        )
        self.order = 0

    def version(self, offset):
        return self.oracle.c - self.oracle.bound + offset

    def attempt(self, legal, action):
        """Does the action if legal; else sees it refused without a trace."""
        if legal:
            return action()
        before = self.picture()
        with pytest.raises(ProtocolError):
            action()
        assert self.picture() == before
        return None

    def picture(self):
        buffer = self.buffer
        return [buffer.entry(g) for g in buffer.groups()], buffer.counts(), buffer.placement(), buffer.state()

    @rule(group=groups, offset=offsets, spare=st.booleans())
    def reserve(self, group, offset, spare):
        version = self.version(offset)
        legal = self.oracle.may_reserve(group, version, spare)
        if group not in self.buffer:
            assert self.buffer.can_reserve(version, spare) == legal
        self.attempt(legal, lambda: self.buffer.reserve(group, version, spare))
        if legal:
            self.oracle.entries.append(
                {"group": group, "version": version, "occupied": False, "spare": spare, "order": self.order}
            )
            self.order += 1

    @rule(group=groups, offset=offsets)
    def lower(self, group, offset):
        version = self.version(offset)
        legal = self.oracle.may_lower(group, version)
        assert self.buffer.can_lower(group, version) == legal
        self.attempt(legal, lambda: self.buffer.lower(group, version))
        if legal:
            self.oracle.find(group)["version"] = version

    @rule(group=groups)
    def occupy(self, group):
        entry = self.oracle.find(group)
        legal = entry is not None and not entry["occupied"]
        self.attempt(legal, lambda: self.buffer.occupy(group))
        if legal:
            entry["occupied"] = True

    @rule()
    def occupy_all(self):
        for entry in self.oracle.entries:
            if not entry["occupied"]:
                self.buffer.occupy(entry["group"])
                entry["occupied"] = True

    @rule(group=groups)
    def release(self, group):
        legal = self.oracle.may_release(group)
        self.attempt(legal, lambda: self.buffer.release(group))
        if legal:
            self.oracle.entries.remove(self.oracle.find(group))

    @rule(group=groups)
    def promote(self, group):
        legal = self.oracle.may_promote(group)
        assert self.buffer.can_promote(group) == legal
        self.attempt(legal, lambda: self.buffer.promote(group))
        if legal:
            self.oracle.find(group)["spare"] = False

    @rule(spare=groups, firm=groups)
    def swap(self, spare, firm):
        legal = self.oracle.may_swap(spare, firm)
        assert self.buffer.can_swap(spare, firm) == legal
        self.attempt(legal, lambda: self.buffer.swap(spare, firm))
        if legal:
            self.oracle.find(spare)["spare"], self.oracle.find(firm)["spare"] = False, True

    @rule(final=st.booleans())
    def consume(self, final):
        batch = self.oracle.batch(final)
        assert self.buffer.can_consume(final) == (batch is not None)
        consumed = self.attempt(batch is not None, lambda: self.buffer.consume(final))
        if batch is not None:
            assert [entry.group for entry in consumed.entries] == [e["group"] for e in batch]
            assert all(e.version + self.oracle.bound >= consumed.buffer for e in consumed.entries)
            assert consumed.buffer == self.oracle.c
            assert sorted(consumed.expired) == sorted(self.oracle.consume(batch))

    @invariant()
    def same_entries(self):
        seen = []
        for group in self.buffer.groups():
            e = self.buffer.entry(group)
            assert e.deadline == e.version + self.oracle.bound
            seen.append(
                {
                    "group": e.group,
                    "version": e.version,
                    "occupied": e.occupied,
                    "spare": e.spare,
                    "order": e.order,
                }
            )
        assert seen == self.oracle.entries
        assert self.buffer.next_buffer == self.oracle.c
        assert len(self.buffer) == len(seen)

    @invariant()
    def same_counts_and_placement(self):
        oracle = self.oracle
        firm = sorted(oracle.firm(), key=lambda e: (e["version"], not e["occupied"]))
        assert oracle.placeable(firm)
        buffers = [[0, 0] for _ in range(oracle.bound + 1)]
        for place, entry in enumerate(firm):
            buffers[place // oracle.batch_size][entry["occupied"]] += 1
        assert self.buffer.placement() == tuple(map(tuple, buffers))
        offsets = [e["version"] + oracle.bound - oracle.c for e in firm]
        assert self.buffer.counts().as_tuple() == tuple(offsets.count(k) for k in range(oracle.bound + 1))

    @invariant()
    def same_state(self):
        if self.oracle.batch(final=False) is not None:
            expected = BufferState.READY
        elif self.oracle.may_reserve("new", self.oracle.c, False):
            expected = BufferState.WAITING
        else:
            expected = BufferState.STUCK
        assert self.buffer.state() == expected
        assert self.buffer.can_consume(final=True) == (self.oracle.batch(final=True) is not None)
        if all(e["occupied"] for e in self.oracle.entries):
            assert expected != BufferState.STUCK  # liveness


Protocol.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestProtocol = Protocol.TestCase
