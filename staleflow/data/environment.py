"""What comes after the model has stopped: the end, a given segment (tool output, next turn), or waiting.

Invariants: an environment is a function of the trajectory (no state of its own that a retry could find
changed), and it speaks in token ids, so that what was sampled is never tokenized again. Given tokens have no
log-prob and no version, are masked out of the loss, and count in the budget of the whole trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import ConfigError
from staleflow.registry import make_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The trajectory goes on after these tokens, which no weights generated."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The answer comes later: the trajectory leaves its instance and keeps its reservation."""

    limit_s: float
    """Seconds after which the trajectory counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Nothing follows: the trajectory is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The environment raised, or did not answer in time: the trajectory is masked."""

    reason: str


Answer = Given | Waiting | Done | Failed


SINGLE_TURN = "single_turn"
"""No environment: one prompt, one response."""
ENVIRONMENTS = {"scripted_turns": "staleflow.data.environment.ScriptedTurns"}
"""Names to classes; a dotted path of one's own is as good."""


def load_environment(name: str, options: Mapping[str, Any]) -> Environment | None:
    """The environment of that name or dotted path, made with `options`; None: every turn is the last.

    Raises ConfigError when it cannot be loaded or made.
    """
    if name == SINGLE_TURN:
        if options:
            raise ConfigError(f"environment.options are given, but {SINGLE_TURN} takes none")
        return None
    environment: Environment = make_named("environment.name", name, ENVIRONMENTS, options, ["respond"])
    return environment


class Environment(Protocol):
    """Asked each time the model has ended its turn with a stop token."""

    def respond(self, trajectory: Trajectory) -> Answer:
        """What follows `trajectory`. Called again after Waiting, until it says something else.

        Several threads call it at the same time, for different trajectories. An exception masks the
        trajectory.
        """
        ...


class ScriptedTurns:
    """Answers the model's n-th turn with the n-th scripted segment, then ends. For tests and examples."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = [tuple(turn) for turn in turns]

    def respond(self, trajectory: Trajectory) -> Given | Done:
        """The next scripted turn: turns taken so far are counted in the trajectory itself."""
        taken = sum(not segment.generated for segment in trajectory.segments)
        return Given(tokens=self._turns[taken]) if taken < len(self._turns) else Done()


def after_turn(trajectory: Trajectory, answer: Given | Waiting | Done) -> Trajectory:
    """The trajectory after an environment's answer to its finished turn.

    Given: goes on with the tokens appended, unless they leave no room to generate; then they are cut to the
    budget and it is finished for LENGTH. Waiting and Done, and a trajectory that used up its budget or
    failed, change nothing.
    """
    if not isinstance(answer, Given) or trajectory.finish_reason is not FinishReason.STOP:
        return trajectory
    room = trajectory.remaining_tokens
    extended = trajectory.extended(Segment.given(answer.tokens[:room]))
    return extended.finished(FinishReason.LENGTH if len(answer.tokens) >= room else None)
