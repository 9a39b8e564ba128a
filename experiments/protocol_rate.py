"""How many protocol transitions one process makes in a second, without and with the ledger.

What is counted: calls of reserve, lower, occupy, release and consume, one each, however many groups a
consume takes; records that are no transition (start, trained, end) count for nothing. The mix is what a run
does per group: one reserve, then one occupy or, for every twentieth, one release; every tenth is lowered
once before; one consume for every 16 groups, of 8 trajectories each. (A run with more lowers and releases
makes more transitions per trajectory consumed, which cost most, so this mix is on the slow side.)
Bound 3, spares none; groups finish in random order.

That random life is drawn first and written down as a script of calls; what is timed is its replay.

- *Without ledger*: the calls alone, on a `StalenessBuffer`.
- *With ledger*: as in a run, each transition's record is made, for a consume with id and token hash of all
  its trajectories; numbered by `Outbox`, taken out of it, and serialised and written by `LedgerWriter`
  to a file, which is flushed before each training step.
- *With trained records*: also the trainer's record of each step, with five fields of each trajectory.

Not timed: prompts, ids and hashes come ready made, as generation and the token hash are others' work.

Rates are per second of this process's CPU time (user and system), since the machine may be shared; the wall
clock's are printed beside them. The three are replayed in turn; goals are held against the medians.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.coordination.actions import Append, Outbox
from staleflow.coordination.trajectory_table import Member
from staleflow.experiments.study import Finding, Options, Result, Study
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    Lower,
    Occupy,
    Record,
    Release,
    Reserve,
    Trained,
    TrainedMember,
)
from staleflow.storage.ledger import LedgerWriter

BOUND, BATCH_SIZE, GROUP_SIZE = 3, 16, 8
LOWERED, RELEASED = 0.10, 0.05
"""Chances per group."""
GOALS = {"without ledger": 300_000, "with ledger": 100_000}
"""Transitions a second."""
KINDS = ("without ledger", "with ledger", "with trained records")

Script = list[tuple[str, tuple[Any, ...]]]


def draw_script(transitions: int, seed: int = 0) -> Script:
    """A legal life of a buffer as calls of its methods."""
    draw = random.Random(seed)
    buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH_SIZE)
    script: Script = []
    reserved: list[str] = []
    groups = 0

    def call(name: str, *args: Any) -> None:
        getattr(buffer, name)(*args)
        script.append((name, args))

    while len(script) < transitions:
        while buffer.can_reserve(buffer.next_buffer):
            group = f"e0-p{groups}-a0"
            groups += 1
            call("reserve", group, buffer.next_buffer)
            reserved.append(group)
        at = draw.randrange(len(reserved))
        reserved[at], reserved[-1] = reserved[-1], reserved[at]
        group = reserved.pop()
        older = buffer.entry(group).version - 1
        if draw.random() < LOWERED and buffer.can_lower(group, older):
            call("lower", group, older)
        call("release" if draw.random() < RELEASED else "occupy", group)
        if buffer.can_consume():
            call("consume")
    return script


def draw_members(script: Script, seed: int = 0) -> dict[str, list[Member]]:
    """The rewarded trajectories of every group, as the population holds them."""
    draw = random.Random(seed)
    members: dict[str, list[Member]] = {}
    for group in [args[0] for name, args in script if name == "reserve"]:
        members[group] = [Member(f"{group}-m{m}", group, prompt_length=100) for m in range(GROUP_SIZE)]
        for member in members[group]:
            member.token_hash = f"{draw.getrandbits(64):016x}"
    return members


class Ledgered:
    """A buffer whose every transition is recorded, as `Control` does it, and written, as the runtime does."""

    def __init__(self, ledger: LedgerWriter, members: dict[str, list[Member]], *, with_trained: bool) -> None:
        self._buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH_SIZE)
        self._outbox = Outbox(attempt=0, next_seq=0)
        self._ledger = ledger
        self._members = members
        self._with_trained = with_trained

    def _record(self, record: Record) -> None:
        self._outbox.record(record)
        for action in self._outbox.take():
            if isinstance(action, Append):
                self._ledger.append(action.record, action.seq, action.attempt)

    def reserve(self, group: str, version: int) -> None:
        """Reserve, recorded."""
        self._buffer.reserve(group, version)
        self._record(Reserve(group=group, version=version))

    def lower(self, group: str, version: int) -> None:
        """Lower, recorded."""
        self._buffer.lower(group, version)
        self._record(Lower(group=group, version=version))

    def occupy(self, group: str) -> None:
        """Occupy, recorded."""
        self._buffer.occupy(group)
        self._record(Occupy(group=group))

    def release(self, group: str) -> None:
        """Release, recorded."""
        self._buffer.release(group)
        self._record(Release(group=group, reason="filtered"))

    def consume(self) -> None:
        """Consume, recorded and flushed, and perhaps the training step."""
        consumed = self._buffer.consume()
        groups: list[ConsumedGroup] = []
        for entry in consumed.entries:
            members = self._members[entry.group]
            ids = tuple([m.trajectory_id for m in members])
            hashes = tuple([m.token_hash for m in members])
            groups.append(ConsumedGroup(entry.group, entry.version, ids, hashes))
        self._record(Consume(buffer=consumed.buffer, final=False, groups=tuple(groups)))
        self._ledger.flush()
        if self._with_trained:
            trained = tuple(
                TrainedMember(id=member, min=g.version, max=g.version, tokens=400, hash=digest)
                for g in groups
                for member, digest in zip(g.ids, g.hashes, strict=True)
            )
            self._record(Trained(step=consumed.buffer, version=consumed.buffer, trajectories=trained))
            self._ledger.flush()


def seconds_of(target: StalenessBuffer | Ledgered, script: Script) -> tuple[float, float]:
    """(CPU, wall) seconds that the script takes on a fresh target."""
    calls = [(getattr(target, name), args) for name, args in script]
    wall, cpu = time.perf_counter(), time.process_time()
    for call, args in calls:
        call(*args)
    return time.process_time() - cpu, time.perf_counter() - wall


def replay_bare(script: Script) -> tuple[float, float]:
    """(CPU, wall) seconds of the transitions alone."""
    return seconds_of(StalenessBuffer(bound=BOUND, batch_size=BATCH_SIZE), script)


def replay_with_ledger(
    script: Script, members: dict[str, list[Member]], *, with_trained: bool
) -> tuple[float, float]:
    """(CPU, wall) seconds of the transitions with their ledger in a file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LedgerWriter(Path(folder) / "ledger.jsonl") as ledger,
    ):
        return seconds_of(Ledgered(ledger, members, with_trained=with_trained), script)


def measure(transitions: int, repeats: int) -> dict[str, Any]:
    """Medians over the replays, in transitions a second."""
    script = draw_script(transitions)
    members = draw_members(script)
    replays: dict[str, Callable[[], tuple[float, float]]] = {
        "without ledger": lambda: replay_bare(script),
        "with ledger": lambda: replay_with_ledger(script, members, with_trained=False),
        "with trained records": lambda: replay_with_ledger(script, members, with_trained=True),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            seen[name].append(replay())
    result: dict[str, Any] = {"transitions": len(script), "mix": dict(Counter(name for name, _ in script))}
    for name, seconds in seen.items():
        result[name] = {
            "per_cpu_s": round(len(script) / statistics.median(cpu for cpu, _ in seconds)),
            "per_cpu_s_best": round(len(script) / min(cpu for cpu, _ in seconds)),
            "per_wall_s": round(len(script) / statistics.median(wall for _, wall in seconds)),
            "goal": GOALS.get(name),
        }
    return result


def findings(options: Options) -> tuple[Finding, ...]:
    """One rate for each kind of replay."""
    rates = measure(5_000 if options.quick else 20_000, 3 if options.quick else 25)
    return tuple(
        Finding(
            name=f"protocol transitions, {kind}",
            value=rates[kind]["per_cpu_s"],
            unit="/s",
            goal=rates[kind]["goal"],
            wanted="at least",
            note="median over replays of a drawn life of the buffer; "
            f"best {rates[kind]['per_cpu_s_best']:,}, "
            f"median per second of wall time {rates[kind]['per_wall_s']:,}",
        )
        for kind in KINDS
    )


PROTOCOL = Study(
    name="protocol",
    question="How many protocol transitions does one process make in a second?",
    script=lambda options: Result(
        findings=findings(options),
        notes=("Per second of CPU time, which does not count waiting for a core.",),
    ),
)
