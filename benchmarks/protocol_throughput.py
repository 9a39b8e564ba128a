"""How many protocol transitions one process makes in a second, without and with the ledger.

    python benchmarks/protocol_throughput.py [--json]

A random life of a buffer (bound 3, batches of 16 groups of 8; every tenth group is lowered once, every
twentieth is released instead of occupied, groups finish in random order) is drawn first and written down as
a script of calls; then the script is replayed on fresh buffers and timed. "With ledger" builds the record of
each transition, serialises it and writes it to a file, flushed after each consume. "With trained records"
adds the trainer's own record of each step, which is no transition and is not counted as one. Each figure is
the best and the median of several short replays, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import (
    Consume,
    ConsumedGroup,
    ConsumedMember,
    Lower,
    Occupy,
    Record,
    Release,
    Reserve,
    Trained,
    TrainedMember,
    to_json,
)

BOUND, BATCH_SIZE, GROUP_SIZE = 3, 16, 8
LOWERED, RELEASED = 0.10, 0.05
"""Chances per group."""
HASH = "0123456789abcdef"
GOAL_BARE, GOAL_LEDGER = 300_000, 100_000
"""Transitions a second."""

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


def replay_bare(script: Script) -> float:
    """Seconds that the script takes on a fresh buffer."""
    buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH_SIZE)
    calls = [(getattr(buffer, name), args) for name, args in script]
    started = time.perf_counter()
    for call, args in calls:
        call(*args)
    return time.perf_counter() - started


class Ledgered:
    """A buffer whose every transition is written to a ledger file."""

    def __init__(self, out: TextIO, members: dict[str, list[str]], with_trained: bool) -> None:
        self.buffer = StalenessBuffer(bound=BOUND, batch_size=BATCH_SIZE)
        self.out = out
        self.members = members
        self.with_trained = with_trained
        self.seq = 0

    def write(self, record: Record) -> None:
        """Number and write one record."""
        self.out.write(to_json(record, self.seq, 0) + "\n")
        self.seq += 1

    def reserve(self, group: str, version: int) -> None:
        """Reserve, recorded."""
        self.buffer.reserve(group, version)
        self.write(Reserve(group=group, version=version))

    def lower(self, group: str, version: int) -> None:
        """Lower, recorded."""
        self.buffer.lower(group, version)
        self.write(Lower(group=group, version=version))

    def occupy(self, group: str) -> None:
        """Occupy, recorded."""
        self.buffer.occupy(group)
        self.write(Occupy(group=group))

    def release(self, group: str) -> None:
        """Release, recorded."""
        self.buffer.release(group)
        self.write(Release(group=group, reason="filtered"))

    def consume(self) -> None:
        """Consume, recorded and flushed, and perhaps the training step."""
        consumed = self.buffer.consume()
        members = self.members
        groups = tuple(
            [
                ConsumedGroup(
                    group=entry.group,
                    version=entry.version,
                    trajectories=tuple([ConsumedMember(id=m, hash=HASH) for m in members[entry.group]]),
                )
                for entry in consumed.entries
            ]
        )
        self.write(Consume(buffer=consumed.buffer, final=False, groups=groups))
        self.out.flush()
        if self.with_trained:
            trained = [
                TrainedMember(id=m.id, min=g.version, max=g.version, tokens=400, hash=m.hash)
                for g in groups
                for m in g.trajectories
            ]
            self.write(Trained(step=consumed.buffer, version=consumed.buffer, trajectories=tuple(trained)))


def replay_with_ledger(script: Script, with_trained: bool = False) -> float:
    """Seconds that the script takes on a fresh buffer with its ledger in a file."""
    groups = [args[0] for name, args in script if name == "reserve"]
    members = {group: [f"{group}-m{m}" for m in range(GROUP_SIZE)] for group in groups}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "ledger.jsonl").open("w") as out:
        ledgered = Ledgered(out, members, with_trained)
        calls = [(getattr(ledgered, name), args) for name, args in script]
        started = time.perf_counter()
        for call, args in calls:
            call(*args)
        out.flush()
        return time.perf_counter() - started


def rates(replay: Callable[[Script], float], script: Script, repeats: int) -> tuple[float, float]:
    """Best and median transitions a second over several replays."""
    seen = [len(script) / replay(script) for _ in range(repeats)]
    return max(seen), statistics.median(seen)


def main(arguments: list[str]) -> int:
    """Measure and print; exit code 1 when a goal is missed by the best replay."""
    parser = argparse.ArgumentParser(description="Protocol transitions a second.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=25)
    chosen = parser.parse_args(arguments)
    script = draw_script(chosen.transitions)
    bare, bare_median = rates(replay_bare, script, chosen.repeats)
    ledger, ledger_median = rates(replay_with_ledger, script, chosen.repeats)
    whole, whole_median = rates(partial(replay_with_ledger, with_trained=True), script, chosen.repeats)
    result = {
        "transitions": len(script),
        "mix": dict(Counter(name for name, _ in script)),
        "bare_per_s": round(bare),
        "bare_per_s_median": round(bare_median),
        "bare_goal": GOAL_BARE,
        "ledger_per_s": round(ledger),
        "ledger_per_s_median": round(ledger_median),
        "ledger_goal": GOAL_LEDGER,
        "with_trained_records_per_s": round(whole),
        "with_trained_records_per_s_median": round(whole_median),
    }
    if chosen.json:
        print(json.dumps(result))
    else:
        print(f"{len(script):,} transitions: {result['mix']}")
        for name, best, median, goal in (
            ("without ledger", bare, bare_median, f"  (goal {GOAL_BARE:,})"),
            ("with ledger", ledger, ledger_median, f"  (goal {GOAL_LEDGER:,})"),
            ("with trained records", whole, whole_median, ""),
        ):
            print(f"{name:<21}{best:>9,.0f}/s best  {median:>9,.0f}/s median{goal}")
    return 0 if bare >= GOAL_BARE and ledger >= GOAL_LEDGER else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
