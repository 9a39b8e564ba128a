"""Ledger records: one frozen value per protocol transition, and its line of JSON.

Invariants:

- one record is one line; `seq`, `attempt` and `kind` come first, the record's own fields follow in the
  order in which they are declared here;
- `from_json(to_json(record, seq, attempt)) == (seq, attempt, record)` for every record.

The ledger is on the hot path, so lines are assembled by hand: every id goes through the JSON string encoder;
everything else is an integer, a boolean or a word of a closed set. Parts of records that exist once per group
or trajectory are named tuples, which are cheaper to create than frozen dataclasses. The records themselves
are dataclasses, so that records of different kinds are never equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal, NamedTuple

LastBatch = Literal["train", "drop", "pad"]
ReleaseReason = Literal["filtered", "aborted", "failed", "expired", "discarded"]
EndReason = Literal["completed", "exhausted", "interrupted", "filtered_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First record of a ledger: the constants of the run."""

    bound: int
    """Staleness bound, in weight versions."""
    batch_size: int
    """Groups per training step."""
    group_size: int
    """Trajectories per group."""
    last_batch: LastBatch
    spare_limit: int
    """Most spare entries at once."""

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return (
            f'"kind":"start","bound":{self.bound},"batch_size":{self.batch_size},'
            f'"group_size":{self.group_size},"last_batch":{quoted(self.last_batch)},'
            f'"spare_limit":{self.spare_limit}'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A new attempt begins: it voids earlier consumes of buffers >= `step` and all open entries."""

    step: int

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"resume","step":{self.step}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A group enters the buffer."""

    group: str
    version: int
    """V of the reservation."""
    spare: bool = False

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        spare = "true" if self.spare else "false"
        return f'"kind":"reserve","group":{quoted(self.group)},"version":{self.version},"spare":{spare}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Lower:
    """A member starts on an older version than the reservation's."""

    group: str
    version: int

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"lower","group":{quoted(self.group)},"version":{self.version}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupy:
    """All kept members of the group are rewarded."""

    group: str

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"occupy","group":{quoted(self.group)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The group leaves the buffer untrained."""

    group: str
    reason: ReleaseReason

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"release","group":{quoted(self.group)},"reason":{quoted(self.reason)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """A spare entry becomes firm."""

    group: str

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"promote","group":{quoted(self.group)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A finished spare and an unfinished firm entry change places."""

    spare: str
    firm: str

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"swap","spare":{quoted(self.spare)},"firm":{quoted(self.firm)}'


class ConsumedGroup(NamedTuple):
    """One group handed to the trainer."""

    group: str
    version: int
    """V of the entry when it was consumed."""
    ids: tuple[str, ...]
    """Its trajectories."""
    hashes: tuple[str, ...]
    """`token_hash` of the sampled response ids of each."""

    def as_json(self) -> str:
        """The group as a JSON object."""
        members = ",".join(
            [f'{{"id":{quoted(i)},"hash":{quoted(h)}}}' for i, h in zip(self.ids, self.hashes, strict=True)]
        )
        return f'{{"group":{quoted(self.group)},"version":{self.version},"trajectories":[{members}]}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Consume:
    """The batch of training step `buffer` leaves the buffer; flushed before its update starts."""

    buffer: int
    final: bool
    groups: tuple[ConsumedGroup, ...]
    """In the order of consumption."""

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        final = "true" if self.final else "false"
        groups = ",".join([group.as_json() for group in self.groups])
        return f'"kind":"consume","buffer":{self.buffer},"final":{final},"groups":[{groups}]'


class TrainedMember(NamedTuple):
    """One trajectory as the trainer read it from its own tensors."""

    id: str
    min: int
    """Oldest weight version among its generated tokens."""
    max: int
    """Newest weight version among its generated tokens."""
    tokens: int
    """Generated tokens in the loss."""
    hash: str
    """`token_hash` of the response ids in the training tensors."""

    def as_json(self) -> str:
        """The trajectory as a JSON object."""
        return (
            f'{{"id":{quoted(self.id)},"min":{self.min},"max":{self.max},'
            f'"tokens":{self.tokens},"hash":{quoted(self.hash)}}}'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A training step is done."""

    step: int
    version: int
    """Weight version at the start of the update."""
    trajectories: tuple[TrainedMember, ...]

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        members = ",".join([member.as_json() for member in self.trajectories])
        return f'"kind":"trained","step":{self.step},"version":{self.version},"trajectories":[{members}]'


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Last record of an attempt that ended in order."""

    steps: int
    """Training steps since version 0, earlier attempts included."""
    reason: EndReason

    def body(self) -> str:
        """Kind and fields as the inside of a JSON object."""
        return f'"kind":"end","steps":{self.steps},"reason":{quoted(self.reason)}'


Record = (
    Start | Resume | Reserve | Lower | Occupy | Release | Promote | Swap | Consume | Trained | End
)  # fmt: skip


def to_json(record: Record, seq: int, attempt: int) -> str:
    """The ledger line of a record, without the newline."""
    return f'{{"seq":{seq},"attempt":{attempt},{record.body()}}}'


def from_json(line: str | bytes) -> tuple[int, int, Record]:
    """Sequence number, attempt and record of a ledger line.

    Raises ValueError when the line is not JSON (a torn line), its kind is unknown, or its fields are not
    exactly those of the kind.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"a ledger line must be a JSON object, not {type(fields).__name__}")
    try:
        seq, attempt, kind = fields.pop("seq"), fields.pop("attempt"), fields.pop("kind")
        return seq, attempt, _READERS[kind](fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a ledger record: {error!r}") from error


def _consume(fields: dict[str, Any]) -> Consume:
    return Consume(**{**fields, "groups": tuple(map(_consumed_group, fields["groups"]))})


def _consumed_group(fields: dict[str, Any]) -> ConsumedGroup:
    members = fields.pop("trajectories")
    if any(member.keys() != {"id", "hash"} for member in members):
        raise TypeError("a consumed trajectory has an id and a hash, and nothing else")
    return ConsumedGroup(
        **fields, ids=tuple(m["id"] for m in members), hashes=tuple(m["hash"] for m in members)
    )


def _trained(fields: dict[str, Any]) -> Trained:
    return Trained(**{**fields, "trajectories": tuple(TrainedMember(**m) for m in fields["trajectories"])})


_READERS: dict[str, Callable[[dict[str, Any]], Record]] = {
    "start": lambda fields: Start(**fields),
    "resume": lambda fields: Resume(**fields),
    "reserve": lambda fields: Reserve(**fields),
    "lower": lambda fields: Lower(**fields),
    "occupy": lambda fields: Occupy(**fields),
    "release": lambda fields: Release(**fields),
    "promote": lambda fields: Promote(**fields),
    "swap": lambda fields: Swap(**fields),
    "consume": _consume,
    "trained": _trained,
    "end": lambda fields: End(**fields),
}
