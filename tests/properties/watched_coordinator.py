"""The coordinator of a random cluster: the same snapshot, the same commands, whatever it remembers."""

from __future__ import annotations

import random

from cluster_settings import ClusterSettings
from cluster_watch import Violation

from staleflow.coordination.coordinator import Coordinator, Decision
from staleflow.coordination.policies import build_coordinator
from staleflow.coordination.snapshot import Snapshot


class WatchedCoordinator(Coordinator):
    """Decides as its policy does, and now and then lets one decide that knows only whose turn it is."""

    def __init__(self, settings: ClusterSettings, inner: Coordinator | None = None) -> None:
        """`inner` decides; None: the policy of the settings."""
        self._settings, self._rng = settings, random.Random(settings.seed)
        self.is_policy = inner is None
        """Every command that it decides on can be carried out."""
        self._inner = inner or build_coordinator(settings.policy, settings.strategies)
        self.decision = Decision(commands=())

    def step(self, snapshot: Snapshot) -> Decision:
        expected: Decision | None = None
        if self.is_policy and self._rng.random() < 0.1:
            fresh = build_coordinator(self._settings.policy, self._settings.strategies)
            known, memory = self._inner._routing._memory, fresh._routing._memory  # type: ignore[attr-defined]
            memory.turn, memory.last_turn = known.turn, dict(known.last_turn)
            waiting, counts = [str(item) for item in snapshot.pending], snapshot.counts.copy()
            expected = fresh.step(snapshot)
            if waiting != [str(item) for item in snapshot.pending] or counts != snapshot.counts:
                raise Violation(f"seed {self._settings.seed}: a step of the coordinator changed its snapshot")
        self.decision = self._inner.step(snapshot)
        if expected is not None and expected != self.decision:
            raise Violation(
                f"seed {self._settings.seed}: with a memory {self.decision}, without one {expected}"
            )
        return self.decision
