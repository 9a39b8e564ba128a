"""A whole run in this process, on one clock."""

from __future__ import annotations

from collections.abc import Callable

from staleflow.config.schema import Config
from staleflow.data.environment import Environment
from staleflow.rollout.engine import Engine
from staleflow.runtime.assembly.data import DataParts, scoring_request
from staleflow.runtime.assembly.engines import build_engine
from staleflow.runtime.assembly.environments import build_inline_environments
from staleflow.runtime.assembly.loop import RealLoop, build_loop, build_monitor
from staleflow.runtime.assembly.scoring import build_evaluator, build_inline_scorer, instance_names
from staleflow.runtime.assembly.training import build_trainer
from staleflow.runtime.backends.inline import InlineBackend, InlinePace
from staleflow.runtime.clock import Clock, VirtualClock
from staleflow.runtime.session import ThreadSession
from staleflow.runtime.start import RunPaths, StartPoint
from staleflow.telemetry.monitor import RunMonitor
from staleflow.training.trainer import Trainer


def build_inline_session(
    config: Config, data: DataParts, start: StartPoint, paths: RunPaths
) -> ThreadSession:
    """Start the loop in a thread, on a virtual clock."""
    clock = VirtualClock()
    monitor = build_monitor(config, paths, clock)
    loop = build_inline_loop(config, data, start, paths, monitor=monitor, clock=clock)
    return ThreadSession(monitor, loop.run, loop.request_stop)


def build_inline_loop(
    config: Config,
    data: DataParts,
    start: StartPoint,
    paths: RunPaths,
    *,
    monitor: RunMonitor,
    clock: Clock,
    make_engine: Callable[[str, int], Engine] | None = None,
    environment: Environment | None = None,
    pace: InlinePace | None = None,
) -> RealLoop:
    """The loop over an inline backend.

    `make_engine(instance, incarnation)` and `environment` replace those of the config; `pace`: see
    `InlineBackend`.
    """
    from staleflow.servers.parameter_server import ParameterServer
    from staleflow.training.checkpoints import write_checkpoint

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
    transport = "memory" if config.cluster.transport == "auto" else config.cluster.transport
    environments = build_inline_environments(config, data.tokenizer.vocab_size, environment)
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
        weights=ParameterServer(transport, run_name=paths.name, **config.cluster.transport_options),
        clock=clock,
        environments=environments,
        pace=pace,
    )
    return build_loop(
        config,
        start,
        paths,
        prompts=data.train,
        backend=backend,
        monitor=monitor,
        clock=clock,
        multi_turn=environments is not None,
    )
