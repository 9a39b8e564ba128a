"""The run loop with its observer and its journal: the same for every backend."""

from __future__ import annotations

from collections.abc import Callable

from staleflow.config.schema import Config
from staleflow.data.environment import Environment, SingleTurn
from staleflow.data.sources import PromptSource
from staleflow.runtime.assembly.control import build_control, build_trajectory_server, kept_bound
from staleflow.runtime.backend import Backend
from staleflow.runtime.clock import Clock
from staleflow.runtime.gc_tuning import Heap
from staleflow.runtime.loop import LoopSettings, RunLoop
from staleflow.runtime.observer import Intervals, Observer
from staleflow.runtime.start import RunPaths, StartPoint
from staleflow.storage.journal import JournalWriter
from staleflow.storage.ledger import LedgerWriter


def build_loop(
    config: Config,
    start: StartPoint,
    paths: RunPaths,
    *,
    prompts: PromptSource,
    backend: Backend,
    observer: Observer,
    clock: Clock,
    environment: Environment | None = None,
    heap: Heap | None = None,
) -> RunLoop:
    """The loop of one attempt, on any backend.

    `environment` None: that of the config; `heap`: see `RunLoop`.
    """
    return RunLoop(
        control=build_control(config, start),
        server=build_trajectory_server(config, prompts, start),
        environment=environment or SingleTurn(),
        backend=backend,
        ledger=LedgerWriter(paths.ledger),
        opening=start.opening,
        observer=observer,
        clock=clock,
        settings=_loop_settings(config),
        journal=build_journal(paths, start, observer, clock),
        heap=heap,
    )


def build_observer(
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


def build_journal(paths: RunPaths, start: StartPoint, observer: Observer, clock: Clock) -> JournalWriter:
    """The journal of an attempt. Its times are those of the rows."""
    return JournalWriter(
        paths.journal,
        attempt=start.attempt,
        step=start.step,
        clock=clock.now,
        began=observer.began,
        wall=clock.wall(),
    )


def _loop_settings(config: Config) -> LoopSettings:
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
