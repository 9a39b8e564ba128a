"""Whole runs in one process with one thing gone wrong: what the fault scenarios have in common.

Everything here watches a `ToyRun` from outside, or replaces one part of it. The ledger is read back from its
file, as the audit does, and never asked of the parts that wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from toy import ToyRun, opening

from staleflow.config.schema import Config
from staleflow.coordination.actions import Route
from staleflow.coordination.speculative import SpeculativeState
from staleflow.data.sums import ALPHABET
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import Consume, Release, Resume, Trained
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine, FakeScript
from staleflow.rollout.scripted_lengths import Lengths
from staleflow.runtime.assembly.engines import fake_lengths
from staleflow.runtime.backends.inline import InlinePace
from staleflow.runtime.start import StartPoint, resumed_start
from staleflow.storage.ledger import read_ledger

STOP = 1
VOCABULARY = 2 + len(ALPHABET)
ALLOWED = [token for token in range(VOCABULARY) if token != STOP]
"""What the fake engine draws from."""

R = TypeVar("R")


# ---------------------------------------------------------------------- the ledger


def records_of(path: Path, kind: type[R]) -> list[R]:
    """All records of one kind, voided ones too."""
    return [record for _, _, record in read_ledger(path) if isinstance(record, kind)]


def use_of(group_id: str) -> str:
    """`e<epoch>-p<prompt>`: the prompt use, without the attempt."""
    return group_id.rpartition("-a")[0]


def uses(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Prompt uses that count in the end: (trained, filtered). What a resume voided is left out.

    A use belongs to the step that was next when it happened; going back to step N voids those from N on.
    """
    trained: dict[int, list[str]] = {}
    filtered: dict[int, list[str]] = {}
    step = 0
    for _, _, record in read_ledger(path):
        match record:
            case Resume():
                step = record.step
                trained = {k: v for k, v in trained.items() if k < step}
                filtered = {k: v for k, v in filtered.items() if k < step}
            case Release(reason="filtered"):
                filtered.setdefault(step, []).append(use_of(record.group))
            case Consume():
                trained[record.buffer] = [use_of(g.group) for g in record.groups]
                step = record.buffer + 1
    return (
        Counter(use for batch in trained.values() for use in batch),
        Counter(use for batch in filtered.values() for use in batch),
    )


def hashes(path: Path) -> dict[str, str]:
    """Hash of the ids trained on, by trajectory id, as the trainer read them off its tensors."""
    return {t.id: t.hash for record in records_of(path, Trained) for t in record.trajectories}


def rows(run: ToyRun, kind: str) -> list[dict[str, Any]]:
    """Values of the rows of one kind; takes them, so ask once."""
    return [row.values for row in run.monitor.take_rows() if row.kind == kind]


# ---------------------------------------------------------------------- watching and disturbing a run


def every_poll(run: ToyRun, look: Callable[[int], object]) -> None:
    """Call `look(n)` before the n-th poll."""
    backend = run.loop._backend
    original = backend.poll
    count = [0]

    def poll(timeout_s: float) -> Any:
        count[0] += 1
        look(count[0])
        return original(timeout_s)

    backend.poll = poll  # type: ignore[method-assign]


def batches_of(run: ToyRun) -> list[TrainBatch]:
    """The batches handed to the trainer, filled while the run goes on."""
    backend = run.loop._backend
    original, seen = backend.train, []

    def train(batch: TrainBatch, *, hold: bool) -> None:
        seen.append(batch)
        original(batch, hold=hold)

    backend.train = train  # type: ignore[method-assign]
    return seen


def instant_rollout(run: ToyRun, train_polls: int) -> None:
    """Any response is done within a poll, and a training step takes `train_polls`."""
    run.loop._backend._pace = InlinePace(  # type: ignore[attr-defined]
        decode_steps=64, train_polls=train_polls
    )


class Killed(Exception):
    """Stands for kill -9."""


def kill(run: ToyRun) -> None:
    """The process dies, and what the operating system had been given is there afterwards."""
    run.loop._ledger._file.flush()
    raise Killed


def resume(config: Config, folder: Path) -> StartPoint:
    """Where `--resume` would begin."""
    return resumed_start(opening(config), folder / "ledger.jsonl", folder / "checkpoints")


class Restless:
    """A migration strategy that takes every running trajectory back in every cycle: the worst case."""

    def __init__(self, run: ToyRun) -> None:
        self._control = run.loop._control
        self.interrupts = 0

    def migrate(self, state: SpeculativeState) -> None:
        """Interrupt all that was running before this cycle."""
        ordered = {c.trajectory_id for c in state.commands if isinstance(c, Route)}
        for instance in self._control.view.instances():
            for trajectory_id in list(self._control.view.resident(instance)):
                member = self._control._trajectories.member(trajectory_id)
                if (
                    member.state is TrajectoryState.RUNNING
                    and not member.leaving
                    and trajectory_id not in ordered
                ):
                    self.interrupts += 1
                    state.interrupt(trajectory_id, member.length, instance, "restless")


def make_restless(run: ToyRun) -> Restless:
    """Have every trajectory moved about for as long as it runs."""
    run.loop._control._coordinator._migration = restless = Restless(run)
    return restless


class WatchedEngine(FakeEngine):
    """A fake engine that keeps what was asked of it."""

    def __init__(self, instance: str, asked: list[tuple[str, Trajectory]], **options: Any) -> None:
        super().__init__(**options)
        self._instance = instance
        self._asked = asked

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """As in FakeEngine."""
        self._asked.append((self._instance, trajectory))
        super().add(trajectory, greedy=greedy)


def watched_engines(
    config: Config, script: FakeScript | None = None, lengths: Lengths | None = None
) -> tuple[Callable[[str, int], FakeEngine], list[tuple[str, Trajectory]]]:
    """What `ToyRun` takes as `make_engine`, and the list of (instance, trajectory as it was added)."""
    asked: list[tuple[str, Trajectory]] = []

    def make(instance: str, incarnation: int) -> FakeEngine:
        return WatchedEngine(
            instance,
            asked,
            sampling=SamplingParams(stop_token_ids=(STOP,), max_model_len=256),
            seed=config.run.seed,
            version=-1,
            vocab_size=VOCABULARY,
            kv_capacity_tokens=config.rollout.kv_capacity_tokens,
            max_running=config.rollout.max_running,
            lengths=lengths or fake_lengths(config),
            script=script or FakeScript(),
        )

    return make, asked


def trajectories_of(batches: Sequence[TrainBatch]) -> list[Trajectory]:
    """All members of all batches."""
    return [scored.trajectory for batch in batches for group in batch.groups for scored in group]
