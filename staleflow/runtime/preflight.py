"""The preflight: every refusal that can be made before a run folder or a process of the run exists.

Invariants: each check stands once, in one of the lists below, and is made once; cheap ones come first, and a
cluster is connected to only when everything else is right; a refused run leaves nothing behind, so that the
next try needs no `--clean`.

::

    run        parts, models, files, data ──> run folder ──> cluster (connect, places, nodes)
    --dry-run  the same; of a cluster that would be started here only the GPUs are checked
    sweep      for each combination: parts, models, files, data
    simulate   strategies, cost model, simulated machines ──> run folder
    plan       strategies, cost model
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.config.schema import Config
from staleflow.errors import ConfigError, RunFailed, UserError
from staleflow.runtime.assembly import (
    DataParts,
    build_cluster,
    check_local_gpus,
    coordination_checks,
    part_checks,
    read_data,
)
from staleflow.runtime.interrupts import Interrupts
from staleflow.simulation.hardware import cluster_settings
from staleflow.simulation.settings import ClusterSettings
from staleflow.storage.run_folder import check_config, check_run_folder

if TYPE_CHECKING:
    from staleflow.runtime.backends.ray.cluster import RayCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One reason to refuse a command."""

    name: str
    """A config key, or what is checked."""
    make: Callable[[], Any]
    """Raises UserError or RunFailed; returns what it has read or reserved."""
    after: tuple[str, ...] = ()
    """Checks that must have passed: without them this one would only repeat what they found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRun:
    """What the checks of a run have read and reserved."""

    data: DataParts
    cluster: RayCluster | None
    """None: the run is inline."""


# ---------------------------------------------------------------------- what commands call


def prepare_run(config: Config, *, resume: bool, clean: bool) -> ReadyRun:
    """Make every check of a run. Raises the first problem; the caller closes the cluster."""
    found = _passed(run_checks(config, resume=resume, clean=clean))
    return ReadyRun(data=found["data"], cluster=found.get("cluster"))


def prepare_simulation(config: Config, *, clean: bool) -> ClusterSettings:
    """Make every check of a simulated run; returns the simulated machines. Raises the first problem."""
    settings: ClusterSettings = _passed(simulation_checks(config, clean=clean))["simulation"]
    return settings


def prepare_plan(config: Config) -> None:
    """Make every check of a plan. Raises the first problem."""
    _passed(_coordination_checks(config))


def prepare_sweep(config: Config, *, simulated: bool) -> None:
    """Make the checks of one combination, without folder and cluster. Raises the first problem."""
    _passed(_machine_checks(config) if simulated else _config_checks(config))


def run_problems(config: Config, *, resume: bool = False, clean: bool = False) -> list[str]:
    """All problems that a run would have; starts nothing here, and leaves an existing cluster as it was."""
    return _problems(run_checks(config, resume=resume, clean=clean, start_cluster=False))


def simulation_problems(config: Config, *, clean: bool = False) -> list[str]:
    """All problems that a simulated run would have."""
    return _problems(simulation_checks(config, clean=clean))


# ---------------------------------------------------------------------- the lists


def run_checks(config: Config, *, resume: bool, clean: bool, start_cluster: bool = True) -> list[Check]:
    """Those of `staleflow run`. `start_cluster` false: a local cluster is not started."""
    return [
        *_config_checks(config),
        Check(name="run folder", make=partial(_check_folder, config, resume=resume, clean=clean)),
        *_cluster_checks(config, start_cluster=start_cluster),
    ]


def simulation_checks(config: Config, *, clean: bool) -> list[Check]:
    """Those of `staleflow simulate`."""
    return [
        *_machine_checks(config),
        Check(name="run folder", make=partial(_check_folder, config, resume=False, clean=clean)),
    ]


def _config_checks(config: Config) -> list[Check]:
    """What a run needs on the machine of the command."""
    parts = [Check(name=key, make=make) for key, make in part_checks(config)]
    files = [Check(name=key, make=partial(_check_file, key, path)) for key, path in _data_files(config)]
    needed = ("model.source", "model.tokenizer", *(check.name for check in files))
    checks = [*parts, *files, Check(name="data", make=partial(read_data, config), after=needed)]
    if config.cluster.runtime == "ray" and config.cluster.address is None:
        checks.append(Check(name="cluster.shared_memory_dir", make=partial(_check_shared_memory, config)))
    return checks


def _cluster_checks(config: Config, *, start_cluster: bool) -> Iterator[Check]:
    if config.cluster.runtime == "inline":
        return
    folder = Path(config.run.output_dir, config.run.name or "").resolve()
    if start_cluster:
        yield Check(name="cluster", make=partial(_connected, config, folder))
    elif config.cluster.address is not None:
        yield Check(name="cluster", make=lambda: _connected(config, folder).close())
    else:
        yield Check(name="cluster", make=partial(check_local_gpus, config))


def _coordination_checks(config: Config) -> list[Check]:
    return [Check(name=key, make=make) for key, make in coordination_checks(config)]


def _machine_checks(config: Config) -> list[Check]:
    return [
        *_coordination_checks(config),
        Check(name="simulation", make=partial(cluster_settings, config)),
    ]


# ---------------------------------------------------------------------- making them


def _passed(checks: Iterable[Check]) -> dict[str, Any]:
    """Make checks until one raises. Returns what they returned, by name."""
    return {check.name: check.make() for check in checks}


def _problems(checks: Iterable[Check]) -> list[str]:
    """Make all checks; returns a sentence for each that failed."""
    failed: set[str] = set()
    problems = []
    for check in checks:
        if failed.intersection(check.after):
            failed.add(check.name)
            continue
        try:
            check.make()
        except (UserError, RunFailed) as error:
            failed.add(check.name)
            problems.append(str(error))
    return problems


# ---------------------------------------------------------------------- checks that are made here


def _data_files(config: Config) -> Iterator[tuple[str, str]]:
    """Files of a source that reads files: key and path."""
    if config.data.source not in ("jsonl", "parquet"):
        return
    if config.data.path is not None:
        yield "data.path", config.data.path
    held_out = config.data.options.get("held_out_path")
    if config.evaluation.every and isinstance(held_out, str):
        yield "data.options.held_out_path", held_out


def _check_file(key: str, path: str) -> None:
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"{key}: there is no file {path!r}")


def _check_shared_memory(config: Config) -> None:
    """On this machine. On the nodes of a cluster the parameter server finds out."""
    directory = config.cluster.shared_memory_dir
    if directory is not None and not (os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"cluster.shared_memory_dir is {directory!r}, which is not a writable folder: name one in "
            "memory, such as /dev/shm, or leave it out"
        )


def _connected(config: Config, run_folder: Path) -> RayCluster:
    """The cluster. Ray may swallow a KeyboardInterrupt while it starts, so Ctrl-C is acted on afterwards."""
    with Interrupts() as interrupts:
        cluster = build_cluster(config, run_folder)
        if interrupts.count:
            cluster.close()
            raise KeyboardInterrupt
    return cluster


def _check_folder(config: Config, *, resume: bool, clean: bool) -> None:
    output_dir, name = Path(config.run.output_dir), config.run.name
    check_run_folder(output_dir, name, resume=resume, clean=clean)
    if resume and name is not None:
        check_config(output_dir / name, config.model_dump(mode="json"))
