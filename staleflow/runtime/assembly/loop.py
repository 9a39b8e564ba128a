"""The run loop with its listeners: the same for every backend that makes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from staleflow.config.schema import Config
from staleflow.data.sources import PromptSource
from staleflow.data.trajectory import TrainBatch, Trajectory
from staleflow.runtime.assembly.control import build_control, build_trajectory_server, kept_bound
from staleflow.runtime.assembly.environments import has_turns
from staleflow.runtime.backend import Backend
from staleflow.runtime.clock import Clock
from staleflow.runtime.loop import RunLoop
from staleflow.runtime.loop_settings import LoopSettings
from staleflow.runtime.start import RunPaths, StartPoint
from staleflow.storage.ledger import LedgerWriter
from staleflow.telemetry.events import EventStream
from staleflow.telemetry.journal import JournalWriter
from staleflow.telemetry.monitor import Intervals, RunMonitor

IDLE_S = 0.25
"""Longest time that the loop waits for a message: the status is looked at four times a second."""
RealLoop = RunLoop[Trajectory, TrainBatch]


def build_loop(
    config: Config,
    start: StartPoint,
    paths: RunPaths,
    *,
    prompts: PromptSource,
    backend: Backend[Trajectory, TrainBatch],
    monitor: RunMonitor,
    clock: Clock,
    multi_turn: bool | None = None,
    settle: Callable[[], None] = lambda: None,
) -> RealLoop:
    """The loop of one attempt on a backend that makes tokens.

    `multi_turn` None: as the config's environment is; `settle`: see `RunLoop`.
    """
    return RealLoop(
        control=build_control(config, start),
        store=build_trajectory_server(config, prompts, start),
        backend=backend,
        ledger=LedgerWriter(paths.ledger),
        opening=start.opening,
        stream=EventStream([monitor, build_journal(paths, start, monitor, clock)]),
        clock=clock,
        settings=_loop_settings(config, has_turns(config) if multi_turn is None else multi_turn),
        settle=settle,
    )


def build_monitor(
    config: Config,
    paths: RunPaths,
    clock: Clock,
    *,
    intervals: Intervals | None = None,
    redraw: Callable[[], float] | None = None,
    has_rewards: bool = True,
    extra_summary: Callable[[], Mapping[str, float]] = dict,
) -> RunMonitor:
    """The rows and the status of an attempt."""
    return RunMonitor(
        run_name=paths.name,
        policy=config.coordination.policy,
        bound=kept_bound(config),
        steps=config.run.steps,
        longest_response=config.rollout.max_new_tokens,
        now=clock.now,
        wall=clock.wall,
        intervals=intervals,
        redraw=redraw,
        has_rewards=has_rewards,
        extra_summary=extra_summary,
    )


def build_journal(paths: RunPaths, start: StartPoint, monitor: RunMonitor, clock: Clock) -> JournalWriter:
    """The journal of an attempt. Its times are those of the rows."""
    return JournalWriter(
        paths.journal,
        attempt=start.attempt,
        step=start.step,
        clock=clock.now,
        began=monitor.began,
        wall=clock.wall(),
    )


def _loop_settings(config: Config, multi_turn: bool) -> LoopSettings:
    interval_s = config.coordination.interval_ms / 1000
    return LoopSettings(
        steps=config.run.steps,
        # In one process nothing happens between two turns, so there is nothing to wait for.
        interval_s=interval_s if config.cluster.runtime == "ray" else 0.0,
        idle_s=min(interval_s, IDLE_S),
        multi_turn=multi_turn,
        evaluate_every=config.evaluation.every,
        evaluation_backlog=config.evaluation.backlog,
        checkpoint_every=config.checkpoint.every,
        start_timeout_s=config.cluster.start_timeout_s,
    )
