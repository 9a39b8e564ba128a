"""Ledger lines: hand-built JSON that says exactly what the record says."""

import json
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    End,
    Lower,
    Occupy,
    Promote,
    Release,
    Reserve,
    Resume,
    Start,
    Swap,
    Trained,
    TrainedMember,
    from_json,
    to_json,
)

ids = st.text(max_size=12)
numbers = st.integers(-1, 10**6)


@st.composite
def consumed_groups(draw):
    members = draw(st.lists(st.tuples(ids, ids), max_size=3))
    return ConsumedGroup(
        group=draw(ids),
        version=draw(numbers),
        ids=tuple(i for i, _ in members),
        hashes=tuple(h for _, h in members),
    )


groups = consumed_groups()
trained = st.builds(TrainedMember, id=ids, min=numbers, max=numbers, tokens=numbers, hash=ids)
records = st.one_of(
    st.builds(
        Start,
        bound=numbers,
        batch_size=numbers,
        group_size=numbers,
        last_batch=st.sampled_from(["train", "drop", "pad"]),
        spare_limit=numbers,
    ),
    st.builds(Resume, step=numbers),
    st.builds(Reserve, group=ids, version=numbers, spare=st.booleans()),
    st.builds(Lower, group=ids, version=numbers),
    st.builds(Occupy, group=ids),
    st.builds(
        Release,
        group=ids,
        reason=st.sampled_from(["filtered", "aborted", "failed", "expired", "discarded"]),
    ),
    st.builds(Promote, group=ids),
    st.builds(Swap, spare=ids, firm=ids),
    st.builds(Consume, buffer=numbers, final=st.booleans(), groups=st.lists(groups, max_size=3).map(tuple)),
    st.builds(Trained, step=numbers, version=numbers, trajectories=st.lists(trained, max_size=3).map(tuple)),
    st.builds(
        End,
        steps=numbers,
        reason=st.sampled_from(["completed", "exhausted", "interrupted", "filtered_out"]),
    ),
)


def as_plain(value):
    """A record or a part of one as dicts by field name, lists and scalars."""
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, ConsumedGroup):
        members = [{"id": i, "hash": h} for i, h in zip(value.ids, value.hashes, strict=True)]
        return {"group": value.group, "version": value.version, "trajectories": members}
    if hasattr(value, "_asdict"):
        return {name: as_plain(item) for name, item in value._asdict().items()}
    return [as_plain(item) for item in value] if isinstance(value, tuple) else value


@given(records, numbers, numbers)
def test_a_line_is_the_record_field_by_field_and_reads_back(record, seq, attempt):
    line = to_json(record, seq, attempt)
    assert "\n" not in line
    kind = type(record).__name__.lower()
    expected = {"seq": seq, "attempt": attempt, "kind": kind, **as_plain(record)}
    read = json.loads(line)
    assert read == expected
    assert list(read) == list(expected)
    assert from_json(line) == (seq, attempt, record)
    assert from_json(line.encode()) == (seq, attempt, record)


def test_records_of_two_kinds_are_never_equal():
    assert Occupy(group="g") != Promote(group="g")
    assert Reserve(group="g", version=1) != Lower(group="g", version=1)


def test_the_format_is_the_documented_one():
    assert (
        to_json(Reserve(group="e0-p1-a0", version=3), 7, 1)
        == '{"seq":7,"attempt":1,"kind":"reserve","group":"e0-p1-a0","version":3,"spare":false}'
    )
    group = ConsumedGroup(group="g", version=1, ids=("g-m0",), hashes=("ab",))
    assert to_json(Consume(buffer=2, final=True, groups=(group,)), 8, 1) == (
        '{"seq":8,"attempt":1,"kind":"consume","buffer":2,"final":true,'
        '"groups":[{"group":"g","version":1,"trajectories":[{"id":"g-m0","hash":"ab"}]}]}'
    )


@pytest.mark.parametrize(
    "line",
    [
        '{"seq":7,"attempt":1,"kind":"reser',
        "[1]",
        '{"seq":7,"attempt":1}',
        '{"seq":7,"attempt":1,"kind":"reserved","group":"g"}',
        '{"seq":7,"attempt":1,"kind":"occupy"}',
        '{"seq":7,"attempt":1,"kind":"occupy","group":"g","version":1}',
        '{"seq":7,"attempt":1,"kind":"consume","buffer":1,"final":false,"groups":[{"group":"g"}]}',
        '{"seq":7,"attempt":1,"kind":"trained","step":1,"version":1,"trajectories":[3]}',
    ],
)
def test_what_is_no_record_is_refused(line):
    with pytest.raises(ValueError, match=r".+"):
        from_json(line)
