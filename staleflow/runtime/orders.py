"""What `Control` ordered and the loop has not sent yet, and the actions that change payload.

Invariant: a turn sends one message to an instance, one to the rewards and one to the environments, in the
order in which `Control` decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from staleflow.coordination.actions import Append, Command, Discard, GiveUp, Resample, Score, Send, Truncate
from staleflow.coordination.events import Event, Rewarded
from staleflow.data.environment import Answer
from staleflow.data.trajectory import FAILED, FinishReason, Reward
from staleflow.runtime.backend import B, Backend, Ledger, P, TrajectoryStore
from staleflow.runtime.clock import Clock
from staleflow.runtime.turns import TurnEnds
from staleflow.telemetry.events import (
    CommandSent,
    EventStream,
    GenerationEnded,
    GivenUp,
    RecordAppended,
    Released,
    RewardReceived,
    StragglerResampled,
    StragglerTruncated,
)


class Orders(Generic[P, B]):
    """`perform` and the answers of parts add orders; `send` sends them."""

    def __init__(
        self,
        *,
        store: TrajectoryStore[P, B],
        backend: Backend[P, B],
        ledger: Ledger,
        stream: EventStream,
        tell: Callable[[Event], None],
        clock: Clock,
        multi_turn: bool,
    ) -> None:
        """`tell` takes events for Control."""
        self._store = store
        self._backend = backend
        self._ledger = ledger
        self._stream = stream
        self._tell = tell
        self._commands: dict[str, list[Command]] = {}
        self._to_score: list[P] = []
        self._multi_turn = multi_turn
        self._turns = TurnEnds(store, stream, tell, clock)
        self.due_at = math.inf
        """When `send` has something to send; inf: not before something is ordered."""

    def performers(self) -> Mapping[type, Callable[[Any], None]]:
        """What carries out the actions that concern ledger, instances and the payload of trajectories."""
        return {
            Append: self._append,
            Send: self._command,
            Score: self._score,
            Discard: self._discard,
            GiveUp: self._give_up,
            Resample: self._resample,
            Truncate: self._truncate,
        }

    def _append(self, action: Append) -> None:
        self._ledger.append(action.record, action.seq, action.attempt)
        self._stream.emit(RecordAppended, action.seq)

    def _command(self, action: Send) -> None:
        command = action.command
        self._stream.emit(CommandSent, command)
        self._commands.setdefault(command.instance, []).append(command)
        self.due_at = -math.inf

    def _score(self, action: Score) -> None:
        if self._multi_turn:
            self._complete(self._turns.ended(action.trajectory_id))
        else:
            self._complete(self._store.get(action.trajectory_id))

    def _discard(self, action: Discard) -> None:
        dropped = self._store.discard(action.trajectory_ids, action.reason)
        self._stream.emit(Released, dropped, action.reason)

    def _give_up(self, action: GiveUp) -> None:
        self._store.give_up(action.trajectory_id)
        self._stream.emit(GivenUp, trajectory_id=action.trajectory_id, reason=action.reason)

    def _resample(self, action: Resample) -> None:
        dropped = self._store.resample(action.trajectory_id, action.new_id)
        self._stream.emit(StragglerResampled, dropped=dropped, new_id=action.new_id, reason=action.reason)

    def _truncate(self, action: Truncate) -> None:
        cut = self._store.truncate(action.trajectory_id)
        self._stream.emit(StragglerTruncated, trajectory=cut, reason=action.reason)

    def answered(self, answers: Sequence[tuple[str, Answer]]) -> None:
        """Environments have answered."""
        for trajectory_id, answer in answers:
            self._complete(self._turns.answered(trajectory_id, answer))

    def rewarded(self, rewards: Sequence[tuple[str, Reward]]) -> None:
        """Rewards have come."""
        for trajectory_id, reward in rewards:
            dropped = self._store.find(trajectory_id) is None
            self._stream.emit(RewardReceived, trajectory_id, reward, dropped)
            if not dropped:
                hashed = self._store.rewarded(trajectory_id, reward)
                self._tell(Rewarded(trajectory_id, reward.raw, reward.usable, hashed))

    def void(self, instance: str) -> None:
        """The instance is gone: what it was ordered and has not been sent is dropped."""
        self._commands.pop(instance, None)

    def send(self, now: float) -> None:
        """Send everything."""
        if self._to_score:
            complete, self._to_score = self._to_score, []
            self._backend.score(complete)
        if self._turns.next_at <= now:
            self._backend.respond(self._turns.take(now))
        if self._commands:
            commands, self._commands = self._commands, {}
            for instance, theirs in commands.items():
                self._backend.deliver(instance, theirs, self._store.payloads(theirs))
        self.due_at = self._turns.next_at

    def _complete(self, trajectory: P | None) -> None:
        """A complete trajectory is to be scored, unless it was given up."""
        if trajectory is None:
            self.due_at = min(self.due_at, self._turns.next_at)
            return
        self._stream.emit(GenerationEnded, trajectory)
        if trajectory.finish_reason is FinishReason.FAILED:
            self.rewarded(((trajectory.trajectory_id, FAILED),))
        else:
            self._to_score.append(trajectory)
            self.due_at = -math.inf
