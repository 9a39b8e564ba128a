"""The payload of the system: prompts and trajectories.

Invariant: the flattened tokens, log-probs, versions and loss mask of a trajectory are always equally long,
even after interruptions, because all are derived from the same list of segments.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Scalar = TypeVar("Scalar", bound=np.generic)

GIVEN_VERSION = -1
"""Version of given tokens, which no weights generated."""


class FinishReason(StrEnum):
    """Why a trajectory stopped growing."""

    STOP = "stop"
    """The model ended it with a stop token."""
    LENGTH = "length"
    """It used the token budget of the whole trajectory."""
    FAILED = "failed"
    """Generation failed: the trajectory is masked, never silently scored zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One item of a data set."""

    prompt_id: str
    """Unique and stable within the data set, e.g. its line number as text."""
    tokens: tuple[int, ...]
    text: str
    answer: Any
    """The reference for the verifier; opaque here, picklable."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens that were either all generated or all given (tool output, next turn)."""

    generated: bool
    tokens: IntArray
    log_probs: FloatArray
    """Behaviour log-probs in nats at the sampling temperature; 0 for given tokens."""
    versions: IntArray
    """Weight version that generated each token; GIVEN_VERSION for given tokens."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.log_probs) == len(self.versions):
            raise ValueError("tokens, log_probs and versions of a segment must be equally long")

    @staticmethod
    def given(tokens: list[int] | tuple[int, ...] | IntArray) -> Segment:
        """A segment of given tokens."""
        ids = np.asarray(tokens, dtype=np.int32)
        return Segment(
            generated=False,
            tokens=ids,
            log_probs=np.zeros(len(ids), dtype=np.float32),
            versions=np.full(len(ids), GIVEN_VERSION, dtype=np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response to one prompt, unfinished or finished.

    Immutable: `extended` and `finished` return new values.
    """

    trajectory_id: str
    """`<group_id>-m<member>`; opaque everywhere else."""
    group_id: str
    """`e<epoch>-p<prompt>-a<attempt>`."""
    member: int
    prompt: Prompt
    max_new_tokens: int
    """Budget of the whole response, given segments included, over all interruptions and turns."""
    segments: tuple[Segment, ...] = ()
    """The response only; the prompt is not a segment."""
    finish_reason: FinishReason | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.tokens)

    @property
    def response_len(self) -> int:
        """Tokens in the response so far, generated and given."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def length(self) -> int:
        """Prompt and response tokens so far, which the KV cache must hold."""
        return len(self.prompt.tokens) + self.response_len

    @property
    def remaining_tokens(self) -> int:
        """Tokens left in the budget."""
        return max(0, self.max_new_tokens - self.response_len)

    @property
    def tokens(self) -> IntArray:
        """Response token ids, shape (response_len,)."""
        return _concatenated([s.tokens for s in self.segments], np.int32)

    @property
    def log_probs(self) -> FloatArray:
        """Behaviour log-probs, shape (response_len,)."""
        return _concatenated([s.log_probs for s in self.segments], np.float32)

    @property
    def versions(self) -> IntArray:
        """Weight version of each token, shape (response_len,)."""
        return _concatenated([s.versions for s in self.segments], np.int32)

    @property
    def loss_mask(self) -> BoolArray:
        """True where a token was generated, shape (response_len,)."""
        if not self.segments:
            return np.zeros(0, dtype=np.bool_)
        return np.concatenate([np.full(len(s.tokens), s.generated) for s in self.segments])

    @property
    def min_version(self) -> int | None:
        """V_traj: the oldest version among generated tokens; None before the first."""
        return min(
            (int(s.versions.min()) for s in self.segments if s.generated and len(s.versions)), default=None
        )

    @property
    def max_version(self) -> int | None:
        """The newest version among generated tokens; None before the first."""
        return max(
            (int(s.versions.max()) for s in self.segments if s.generated and len(s.versions)), default=None
        )

    @property
    def version_runs(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each stretch of the response; GIVEN_VERSION for given tokens."""
        versions = self.versions
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        return tuple((int(versions[a]), b - a) for a, b in itertools.pairwise(starts) if b > a)

    def extended(self, segment: Segment) -> Trajectory:
        """This trajectory with one more segment; joins adjacent segments of one kind."""
        if len(segment.tokens) == 0:
            return self
        if self.segments and self.segments[-1].generated == segment.generated:
            last = self.segments[-1]
            joined = Segment(
                generated=last.generated,
                tokens=np.concatenate([last.tokens, segment.tokens]),
                log_probs=np.concatenate([last.log_probs, segment.log_probs]),
                versions=np.concatenate([last.versions, segment.versions]),
            )
            return replace(self, segments=(*self.segments[:-1], joined))
        return replace(self, segments=(*self.segments, segment))

    def finished(self, reason: FinishReason | None) -> Trajectory:
        """This trajectory with its finish reason set (None: it may continue)."""
        return replace(self, finish_reason=reason)


def _concatenated(parts: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def token_hash(tokens: IntArray) -> str:
    """Short stable hash of a token id array, for the ledger."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The verifier's result for one trajectory."""

    raw: float
    """The verifier's own score; filtering and group statistics use it, never the shaped one."""
    status: str = "ok"
    """`ok`, `timeout`, `crash`, `memory`, `error` or `failed`."""
    usable: bool = True
    """False: the member is excluded from the loss and the group statistics."""
    seconds: float = 0.0


FAILED = Reward(raw=0.0, status="failed", usable=False)
"""The reward of an abandoned trajectory: masked, never a silent zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A finished trajectory with its reward, the trainer's input."""

    trajectory: Trajectory
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups of one training step, in the protocol's order of consumption."""

    step: int
    """The consumed buffer = the weight version at the start of the update."""
    groups: tuple[tuple[ScoredTrajectory, ...], ...]
    final: bool = False
    """True for the last, possibly smaller batch of a run."""
