"""The outcome of one verifier call, and the policy that turns it into a reward.

Invariants:

- a raw reward is a finite float; any other return value of a verifier is an `error`;
- a failure is never a silent zero: its status is kept, and it is counted.
"""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from staleflow.data.trajectory import Reward
from staleflow.errors import ConfigError

OnFailure = Literal["zero", "mask"]
"""What to do with a failed call: score 0 and train on it, or mask it out of loss and group statistics."""

Status = Literal["ok", "timeout", "crash", "memory", "error", "failed"]

_MESSAGE_LENGTH = 300
_log = logging.getLogger("staleflow.reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierOutcome:
    """One call of a verifier."""

    status: Status
    raw: float = 0.0
    seconds: float = 0.0
    message: str = ""
    """What went wrong, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCounts:
    """Number of answers of each kind since the start."""

    scored_count: int
    timeout_count: int
    error_count: int
    crash_count: int
    memory_count: int
    failed_count: int
    """Never scored, because no worker could be started."""


class OutcomePolicy:
    """Turns outcomes into rewards, counts them, and logs the first failure of each kind."""

    def __init__(self, on_failure: OnFailure) -> None:
        if on_failure not in ("zero", "mask"):
            raise ConfigError(f"reward.on_failure is {on_failure!r}; it must be zero or mask")
        self._on_failure = on_failure
        self._counter: Counter[Status] = Counter()

    def reward(self, trajectory_id: str, outcome: VerifierOutcome) -> Reward:
        """The reward for a call's outcome. `failed` (never scored) is always masked."""
        status = outcome.status
        self._counter[status] += 1
        if status != "ok" and self._counter[status] == 1:
            _log.warning(
                "first reward with status %s: trajectory %s: %s", status, trajectory_id, outcome.message
            )
        return Reward(
            raw=outcome.raw if status == "ok" else 0.0,
            status=status,
            usable=status == "ok" or (status != "failed" and self._on_failure == "zero"),
            seconds=outcome.seconds,
        )

    def counts(self) -> RewardCounts:
        """Counts so far."""
        count = self._counter
        return RewardCounts(
            scored_count=count["ok"],
            timeout_count=count["timeout"],
            error_count=count["error"],
            crash_count=count["crash"],
            memory_count=count["memory"],
            failed_count=count["failed"],
        )


def judge(call: Callable[[], object]) -> VerifierOutcome:
    """Call a verifier with its request bound, and return the outcome."""
    start = time.perf_counter()
    status: Status = "ok"
    raw, message = 0.0, ""
    try:
        value = call()
        if not isinstance(value, numbers.Real):
            raise TypeError(f"the verifier returned a {type(value).__name__}, not a number")
        raw = float(value)
        if not math.isfinite(raw):
            raise ValueError(f"the verifier returned {raw}")
    except MemoryError:
        status, message = "memory", "memory limit reached"
    except (Exception, SystemExit) as error:
        status, message = "error", _described(error)
    return VerifierOutcome(
        status=status,
        raw=raw if status == "ok" else 0.0,
        seconds=time.perf_counter() - start,
        message=message,
    )


def _described(error: BaseException) -> str:
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_MESSAGE_LENGTH]
    except Exception:  # a user's exception may fail to print itself
        return type(error).__name__
