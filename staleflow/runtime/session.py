"""A run as the command that started it sees it: rows, a status, a way to stop, an end.

`InlineSession` runs the loop in a thread of this process; `ray_session.RaySession` in an actor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from staleflow.config.schema import Config
from staleflow.data.environment import Environment, SingleTurn
from staleflow.rollout.engine import Engine
from staleflow.runtime.assembly import (
    DataParts,
    build_control,
    build_engine,
    build_evaluator,
    build_inline_scorer,
    build_trainer,
    build_trajectory_server,
    instance_names,
    kept_bound,
    scoring_request,
)
from staleflow.runtime.backends.inline import InlineBackend, InlinePace
from staleflow.runtime.clock import Clock, VirtualClock
from staleflow.runtime.loop import LoopSettings, RunLoop
from staleflow.runtime.observer import Intervals, Observer
from staleflow.runtime.start import StartPoint
from staleflow.storage.journal import JournalWriter
from staleflow.storage.ledger import LedgerWriter
from staleflow.telemetry.rows import Row, RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where a session writes."""

    name: str
    ledger: Path
    checkpoints: Path
    logs: Path
    journal: Path | None = None
    """None: telemetry.journal is off."""


class Session(Protocol):
    """One attempt under way."""

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Rows since the last look and the newest picture (None: nothing to see yet)."""
        ...

    def request_stop(self) -> None:
        """Finish the step in training, save, and end."""
        ...

    def outcome(self) -> str | None:
        """The finish reason; None while the run goes on. Raises what ended the run, if it failed."""
        ...

    def close(self) -> None:
        """End everything at once, whatever state it is in. May be called twice."""
        ...


def loop_settings(config: Config) -> LoopSettings:
    """The loop's part of the config."""
    return LoopSettings(
        steps=config.run.steps,
        # In one process nothing happens between two turns, so there is nothing to wait for.
        least_gap_s=config.coordination.interval_ms / 1000 if config.cluster.runtime == "ray" else 0.0,
        interval_s=config.coordination.interval_ms / 1000,
        evaluate_every=config.evaluation.every,
        evaluation_backlog=config.evaluation.backlog,
        checkpoint_every=config.checkpoint.every,
        start_timeout_s=config.cluster.start_timeout_s,
    )


def make_observer(
    config: Config,
    paths: RunPaths,
    clock: Clock,
    *,
    intervals: Intervals | None = None,
    redraw: Callable[[], float] | None = None,
    has_rewards: bool = True,
) -> Observer:
    """The observer of an attempt."""
    return Observer(
        run_name=paths.name,
        policy=config.coordination.policy,
        bound=kept_bound(config),
        steps=config.run.steps,
        longest_response=config.rollout.max_new_tokens,
        clock=clock,
        intervals=intervals,
        redraw=redraw,
        has_rewards=has_rewards,
    )


def make_journal(paths: RunPaths, start: StartPoint, observer: Observer, clock: Clock) -> JournalWriter:
    """The journal of an attempt, its time that of the rows."""
    return JournalWriter(
        paths.journal,
        attempt=start.attempt,
        step=start.step,
        clock=clock.now,
        began=observer.began,
        wall=clock.wall(),
    )


def inline_loop(
    config: Config,
    data: DataParts,
    start: StartPoint,
    paths: RunPaths,
    *,
    observer: Observer,
    clock: Clock,
    make_engine: Callable[[str, int], Engine] | None = None,
    environment: Environment | None = None,
    pace: InlinePace | None = None,
) -> RunLoop:
    """Everything in this process, on one clock.

    `make_engine(instance, incarnation)` and `environment` replace the config's; `pace`: see `inline`.
    """
    from staleflow.servers.parameter_server import ParameterServer
    from staleflow.training.checkpoints import write_checkpoint
    from staleflow.training.trainer import Trainer

    def save(trainer: Trainer, version: int) -> None:
        write_checkpoint(paths.checkpoints, version, trainer.save, config.checkpoint.keep)

    def engine_of(instance: str, incarnation: int) -> Engine:
        log = paths.logs / f"rollout-{instance}.engine.log"
        return build_engine(config, data.tokenizer, spend=clock.sleep, log=log)

    evaluator = None
    if data.held_out:
        scorer = build_inline_scorer(config)
        log = paths.logs / "evaluator.engine.log"
        evaluator = build_evaluator(config, data.tokenizer, data.held_out, scorer, log=log)
    backend = InlineBackend(
        instances=instance_names(config),
        make_engine=make_engine or engine_of,
        max_running=config.rollout.max_running,
        on_pull=config.rollout.on_pull,
        progress_interval_s=config.rollout.progress_interval_s,
        trainer=build_trainer(config, start),
        save=save,
        scorer=build_inline_scorer(config),
        request=scoring_request(data.tokenizer),
        evaluator=evaluator,
        weights=ParameterServer("memory", run_name=paths.name).handle,
        clock=clock,
        pace=pace,
    )
    return RunLoop(
        control=build_control(config, start),
        server=build_trajectory_server(config, data.train, start),
        environment=environment or SingleTurn(),
        backend=backend,
        ledger=LedgerWriter(paths.ledger),
        opening=start.opening,
        observer=observer,
        clock=clock,
        settings=loop_settings(config),
        journal=make_journal(paths, start, observer, clock),
    )


class ThreadSession:
    """A loop in a thread of this process."""

    def __init__(self, observer: Observer, loop: Callable[[], str], stop: Callable[[], None]) -> None:
        """`loop` returns the finish reason; `stop` asks it to finish its step and end."""
        self._observer = observer
        self._loop = loop
        self._stop = stop
        self._reason: str | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="run-loop", daemon=True)
        self._thread.start()

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Wait a moment, then take what there is."""
        self._thread.join(timeout_s)
        return self._observer.take_rows(), self._observer.status

    def request_stop(self) -> None:
        """Passed on to the loop."""
        self._stop()

    def outcome(self) -> str | None:
        """See `Session`."""
        if self._failure is not None:
            raise self._failure
        return self._reason

    def close(self) -> None:
        """The thread is a daemon and ends with the process; there is no other process."""

    def _run(self) -> None:
        try:
            self._reason = self._loop()
        except BaseException as error:
            self._failure = error


class InlineSession(ThreadSession):
    """The loop in a thread, on a virtual clock."""

    def __init__(self, config: Config, data: DataParts, start: StartPoint, paths: RunPaths) -> None:
        clock = VirtualClock()
        observer = make_observer(config, paths, clock)
        loop = inline_loop(config, data, start, paths, observer=observer, clock=clock)
        super().__init__(observer, loop.run, loop.request_stop)
