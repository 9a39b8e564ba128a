"""Functions that build the parts; each actor calls one in its own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from staleflow.data.trajectory import Trajectory
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine
from staleflow.runtime.evaluation import Evaluator, Scorer
from staleflow.servers.transport import Handle
from staleflow.training.trainer import Trainer

if TYPE_CHECKING:
    from staleflow.training.deepspeed.peers import Launch


class TrainerBuilder(Protocol):
    """Builds the trainer at the weights that the attempt starts from."""

    def __call__(self, *, launch: Launch | None = None, host: str = "127.0.0.1") -> Trainer:
        """`launch` starts further ranks, which reach this process at `host`; None starts child processes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBuilders:
    """One function per part. Picklable. Every `Path` is the log file of the part's own processes."""

    engine: Callable[[Handle, Path], Engine]
    """Builds an engine without weights. The handle is for engines whose processes load weights themselves."""
    scorer: Callable[[Path], Scorer]
    request: Callable[[], Callable[[Trajectory], ScoreRequest]]
    """Builds the function that makes a scoring request of a finished trajectory."""
    evaluator: Callable[[Handle, Path], Evaluator]
    trainer: TrainerBuilder
