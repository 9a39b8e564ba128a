"""Views of a trajectory for observers: lengths and versions, without tokens.

The values in `data.trajectory` have this form plus their payload; a simulated trajectory has only this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from staleflow.data.trajectory import FinishReason, Reward


class LateTokens(NamedTuple):
    """Tokens that an instance reported after their trajectory had been dropped."""

    trajectory_id: str
    tokens: int
    finished: bool
    """The trajectory ended by itself before its Abort arrived."""


class Response(Protocol):
    """One response so far."""

    @property
    def trajectory_id(self) -> str:
        """Its identity."""
        ...

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def response_len(self) -> int:
        """Tokens of the response."""
        ...

    @property
    def version_runs(self) -> Sequence[tuple[int, int]]:
        """(version, tokens) of each stretch of the response; GIVEN_VERSION for given tokens."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None: not ended."""
        ...

    @property
    def min_version(self) -> int | None:
        """Oldest weight version among the generated tokens; None before the first."""
        ...

    @property
    def max_version(self) -> int | None:
        """Newest weight version among them."""
        ...


class Scored(Protocol):
    """A finished response with its reward."""

    @property
    def trajectory(self) -> Response:
        """The response."""
        ...

    @property
    def reward(self) -> Reward:
        """The verifier's result."""
        ...


class Balance(Protocol):
    """The account of generated tokens."""

    def as_dict(self) -> dict[str, int]:
        """generated, trained, filtered, aborted, discarded, in_flight: generated is the sum of the others."""
        ...
