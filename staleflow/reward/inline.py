"""A scorer without processes, for the inline runtime: for tests and debugging.

Invariant: same interface as `pool.RewardPool`, deterministic, in the order of submission. There are *no
limits*: a verifier that hangs blocks the caller, and one that crashes ends the process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from staleflow.data.trajectory import Reward
from staleflow.reward.outcome import OnFailure, OutcomePolicy, RewardCounts, judge
from staleflow.reward.verifiers import ScoreRequest, Verifier, load_verifier


class InlineScorer:
    """Calls the verifier in `submit`."""

    def __init__(self, verifier: str | Verifier, on_failure: OnFailure = "mask") -> None:
        """Raises ConfigError if the verifier cannot be loaded."""
        self._verifier = load_verifier(verifier) if isinstance(verifier, str) else verifier
        self._policy = OutcomePolicy(on_failure)
        self._done: list[tuple[str, Reward]] = []

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Score them now; exceptions are counted as errors."""
        for request in requests:
            outcome = judge(functools.partial(self._verifier, request))
            self._done.append((request.trajectory_id, self._policy.reward(request.trajectory_id, outcome)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, Reward]]:
        """All answers not yet returned; never waits."""
        done, self._done = self._done, []
        return done

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet returned by `poll`."""
        return len(self._done)

    def counts(self) -> RewardCounts:
        """Answers by kind since the start."""
        return self._policy.counts()

    def close(self) -> None:
        """Does nothing."""
