"""What those who only watch need to know of a trajectory: lengths and versions, none of its tokens.

`data.trajectory` has values of this form with their payload; a simulated trajectory has nothing else.
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
    """The trajectory ended by itself before its Abort came."""


class Response(Protocol):
    """One response as far as it is known."""

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
        """Why it ended; None: it has not."""
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
        """What the verifier said."""
        ...


class Balance(Protocol):
    """The account of generated tokens."""

    def as_dict(self) -> dict[str, int]:
        """generated, trained, filtered, aborted, discarded, in_flight: the first is the sum of the others."""
        ...
