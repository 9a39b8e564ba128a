"""A run on Ray: the cluster, the session, and what each actor builds in its own process.

Invariant: importing this module does not import Ray, which takes a second.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.config.schema import Config
from staleflow.data.trajectory import Trajectory
from staleflow.errors import ConfigError
from staleflow.rollout.engine import Engine
from staleflow.runtime.assembly.data import (
    build_held_out,
    build_source,
    build_tokenizer,
    held_out_prompts,
    scoring_request,
)
from staleflow.runtime.assembly.engines import build_engine
from staleflow.runtime.assembly.environments import build_environments
from staleflow.runtime.assembly.loop import RealLoop, build_loop, build_monitor
from staleflow.runtime.assembly.scoring import build_evaluator, build_pool, instance_names
from staleflow.runtime.assembly.training import build_trainer
from staleflow.runtime.clock import Clock
from staleflow.runtime.evaluation import Evaluator
from staleflow.runtime.gc_tuning import Heap
from staleflow.runtime.start import RunPaths, StartPoint
from staleflow.telemetry.monitor import RunMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

    from staleflow.reward.verifiers import ScoreRequest
    from staleflow.runtime.backends.ray.builders import PartBuilders
    from staleflow.runtime.backends.ray.cluster import RayCluster
    from staleflow.runtime.backends.ray.placement import Placement
    from staleflow.runtime.backends.ray.session import RaySession
    from staleflow.servers.transport import Handle


def build_cluster(config: Config, run_folder: Path) -> RayCluster:
    """Connect to Ray, or start it here, and reserve places for the run's actors.

    `run_folder` need not exist yet. Raises ConfigError or RunFailed, and leaves nothing then.
    """
    from staleflow.runtime.backends.ray.cluster import reserve

    return reserve(config, run_folder)


def check_local_gpus(config: Config) -> None:
    """Raise ConfigError when this machine does not have the GPUs that a local cluster would have to give."""
    placement = config.cluster.placement
    given = (placement.rollout_gpus, placement.training_gpus, placement.evaluation_gpus)
    if not any(given):
        return  # without an amount each part takes what there is
    import torch

    from staleflow.runtime.backends.ray.placement import lack_of_gpus

    if lack := lack_of_gpus(config, torch.cuda.device_count()):
        raise ConfigError(lack)


def build_ray_session(config: Config, cluster: RayCluster, start: StartPoint, paths: RunPaths) -> RaySession:
    """Start the actor with the loop, which starts all others."""
    from staleflow.runtime.backends.ray.session import RaySession

    return RaySession(
        cluster,
        logs=paths.logs,
        make_monitor=partial(build_monitor, config, paths),
        make_loop=partial(_build_ray_loop, config, start, paths, cluster.placement),
        start_timeout_s=config.cluster.start_timeout_s,
    )


def _build_ray_loop(
    config: Config,
    start: StartPoint,
    paths: RunPaths,
    placement: Placement,
    monitor: RunMonitor,
    clock: Clock,
) -> RealLoop:
    """Called in the process of the loop."""
    from staleflow.runtime.backends.ray.backend import RayBackend

    tokenizer = build_tokenizer(config)
    return build_loop(
        config,
        start,
        paths,
        prompts=build_source(config, tokenizer),
        backend=RayBackend(
            config,
            part_builders(config, start),
            instances=instance_names(config),
            run_name=paths.name,
            checkpoints=paths.checkpoints,
            logs=paths.logs,
            clock=clock,
            placement=placement,
            environments=build_environments(config, tokenizer.vocab_size),
        ),
        monitor=monitor,
        clock=clock,
        settle=Heap().settle,
    )


def part_builders(config: Config, start: StartPoint) -> PartBuilders:
    """How each actor builds its part."""
    from staleflow.runtime.backends.ray.builders import PartBuilders

    return PartBuilders(
        engine=partial(_build_engine, config),
        scorer=partial(build_pool, config),
        request=partial(_build_request, config),
        evaluator=partial(_build_evaluator, config),
        trainer=partial(build_trainer, config, start),
    )


def _build_engine(config: Config, weights: Handle, log: Path) -> Engine:
    return build_engine(config, build_tokenizer(config), spend=time.sleep, weights=weights, log=log)


def _build_request(config: Config) -> Callable[[Trajectory], ScoreRequest]:
    return scoring_request(build_tokenizer(config))


def _build_evaluator(config: Config, weights: Handle, log: Path) -> Evaluator:
    tokenizer = build_tokenizer(config)
    prompts = held_out_prompts(config, build_held_out(config, tokenizer))  # the preflight has checked them
    return build_evaluator(config, tokenizer, prompts, build_pool(config), weights=weights, log=log)
