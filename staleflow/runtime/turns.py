"""What follows when the model has ended its turn: the environment is asked, and its answers are applied.

::

    turn ends ──> environment asked ──Given──> pending again, with the tokens appended
                     ^      │  └─────Done, Failed──> complete: goes to its verifier, or is masked
                     └─ Waiting: leaves its instance, is asked again every `ASK_AGAIN_S`

Invariant: a trajectory is with the environment once at most; an answer for one that was dropped or given up
meanwhile changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from staleflow.coordination.events import Ended, Event, TurnGiven, WaitingExternal
from staleflow.data.environment import Answer, Failed, Waiting
from staleflow.data.trajectory import FinishReason
from staleflow.runtime.backend import P, TrajectoryStore
from staleflow.runtime.clock import Clock
from staleflow.telemetry.events import EventStream, GivenUp

ASK_AGAIN_S = 0.05
"""An environment that answers later is asked again this often: far below what a person or a tool takes."""


class TurnEnds(Generic[P]):
    """Trajectories that are with their environment."""

    def __init__(
        self,
        store: TrajectoryStore[P, Any],
        stream: EventStream,
        tell: Callable[[Event], None],
        clock: Clock,
    ) -> None:
        """`tell` takes events for Control."""
        self._store = store
        self._stream = stream
        self._tell = tell
        self._clock = clock
        self._asked: dict[str, bool] = {}
        """Trajectories with their environment; True: Control knows that they wait for it."""
        self.next_at = math.inf
        """When `take` has something; inf: not before another turn ends."""
        self._again: deque[tuple[float, str]] = deque()

    def ended(self, trajectory_id: str) -> P | None:
        """The model has ended its turn, or was cut off. Returns the trajectory if it is complete."""
        trajectory = self._store.get(trajectory_id)
        self._asked.pop(trajectory_id, None)  # given up while it waited
        if trajectory.finish_reason is not FinishReason.STOP:
            return trajectory
        self._asked[trajectory_id] = False
        self._again.appendleft((self._clock.now(), trajectory_id))
        self.next_at = self._again[0][0]
        return None

    def answered(self, trajectory_id: str, answer: Answer) -> P | None:
        """The environment has answered. Returns the trajectory if it is complete."""
        if trajectory_id not in self._asked:
            return None
        if self._store.find(trajectory_id) is None:
            del self._asked[trajectory_id]
            return None
        if isinstance(answer, Waiting):
            self._wait(trajectory_id, answer)
            return None
        waited = self._asked.pop(trajectory_id)
        if isinstance(answer, Failed):
            self._store.give_up(trajectory_id)
            self._stream.emit(GivenUp, trajectory_id=trajectory_id, reason=answer.reason)
            trajectory = self._store.get(trajectory_id)
        else:
            trajectory = self._store.answer(trajectory_id, answer)
        if trajectory.finish_reason is None:
            given = TurnGiven(
                trajectory_id=trajectory_id, length=trajectory.prompt_len + trajectory.response_len
            )
            self._stream.tell(given)
            self._tell(given)
            return None
        if waited:
            self._tell(Ended(trajectory_id=trajectory_id))
        return trajectory

    def _wait(self, trajectory_id: str, answer: Waiting) -> None:
        if not self._asked[trajectory_id]:
            self._asked[trajectory_id] = True
            waiting = WaitingExternal(trajectory_id=trajectory_id, limit_s=answer.limit_s)
            self._stream.tell(waiting)
            self._tell(waiting)
        self._again.append((self._clock.now() + ASK_AGAIN_S, trajectory_id))
        self.next_at = self._again[0][0]

    def take(self, now: float) -> list[P]:
        """Trajectories whose environment is to be asked at `now`."""
        due = []
        while self._again and self._again[0][0] <= now:
            due.append(self._again.popleft()[1])
        self.next_at = self._again[0][0] if self._again else math.inf
        found = [self._store.find(t) for t in due if t in self._asked]
        return [t for t in found if t is not None]
