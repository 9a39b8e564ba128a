"""A simulated trajectory: the number of its tokens and their weight versions, without token ids.

For the run loop it is a `data.responses.Response` that shows what an instance has reported.

Invariant: `runs` and `base` always agree: `base == prompt + sum of the runs' tokens`. Tokens that a running
trajectory has gained after step `since` are not included; `fold` adds them.
"""

from __future__ import annotations

import zlib

from staleflow.data.trajectory import FinishReason, Reward


class SimulatedTrajectory:
    """One response in progress. `since`, `entered` and `stay` belong to the instance that decodes it."""

    __slots__ = (
        "base",
        "dropped_at",
        "entered",
        "failed",
        "group_id",
        "instance",
        "max_version",
        "min_version",
        "prompt",
        "reported",
        "reward",
        "runs",
        "since",
        "stay",
        "target",
        "token_hash",
        "trajectory_id",
        "truncated",
    )

    def __init__(
        self, trajectory_id: str, group_id: str, *, prompt: int, target: int, truncated: bool
    ) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.prompt = prompt
        """Tokens of the prompt."""
        self.target = target
        """Prompt and response tokens when it ends."""
        self.truncated = truncated
        """True if it ends because its budget is used up."""
        self.base = prompt
        """Prompt and response tokens recorded in `runs`."""
        self.runs: list[tuple[int, int]] = []
        """(weight version, tokens), in order; adjacent runs differ in version."""
        self.min_version: int | None = None
        """V_traj; None before the first token."""
        self.max_version: int | None = None
        """Newest version among its tokens; None before the first."""
        self.since = 0
        """Decode step of its instance up to which `base` counts tokens."""
        self.entered = -1
        """Decode step of its instance after which it joined the batch."""
        self.stay = 0
        """Increases whenever it enters or leaves a batch, so that outdated plans for it are recognized."""
        self.reported = prompt
        """Length that its owner knows, and that remains if its instance is lost."""
        self.dropped_at = 0
        """Value of `reported` when it was dropped while an instance held it."""
        self.failed = False
        self.reward: Reward | None = None
        self.token_hash = ""
        self.instance: str | None = None
        """The instance that holds it, running or waiting."""

    @property
    def response(self) -> int:
        """Generated tokens recorded in `runs`."""
        return self.base - self.prompt

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.prompt

    @property
    def response_len(self) -> int:
        """Generated tokens reported so far."""
        return self.reported - self.prompt

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None if its end has not been reported."""
        if self.failed:
            return FinishReason.FAILED
        if self.reported < self.target:
            return None
        return FinishReason.LENGTH if self.truncated else FinishReason.STOP

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each recorded run."""
        return tuple(self.runs)

    def hashed(self) -> str:
        """Set and return `token_hash`, a function of id and length in place of a hash of token ids."""
        self.token_hash = f"{zlib.crc32(f'{self.trajectory_id}:{self.base}'.encode()):08x}"
        return self.token_hash

    def fold(self, step: int, version: int) -> None:
        """Record the tokens gained up to decode step `step` with weights of `version`."""
        gained = step - self.since
        if gained:
            self.since = step
            self.base += gained
            runs = self.runs
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + gained)
            else:
                runs.append((version, gained))
                if self.min_version is None or version < self.min_version:
                    self.min_version = version
                if self.max_version is None or version > self.max_version:
                    self.max_version = version

    def cut(self, length: int) -> int:
        """Drop all tokens after `length`; returns their number."""
        lost = excess = self.base - length
        while excess > 0:
            version, tokens = self.runs.pop()
            if tokens > excess:
                self.runs.append((version, tokens - excess))
            excess -= tokens
        self.base = length
        versions = [version for version, _ in self.runs]
        self.min_version, self.max_version = min(versions, default=None), max(versions, default=None)
        return lost
