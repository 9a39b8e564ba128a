"""Connecting to Ray: a cluster of our own, or one that is there, looked at before anything starts on it.

Invariants: an address where nothing listens is refused in seconds; a node on which a part will run has this
version of staleflow and sees the files that the run names, or the run is refused with the node's name.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import staleflow
from staleflow.config.schema import Config
from staleflow.errors import ConfigError, RunFailed
from staleflow.runtime.backends.ray.placement import Placement

PROBE_LIMIT_S = 5.0
"""To reach a port on another continent takes a third of a second. Ray itself tries for more than a minute."""


def connect(config: Config) -> None:
    """Start a local cluster, or connect to the one at cluster.address.

    Raises ConfigError for what is no address, RunFailed when no cluster answers there.
    """
    address = config.cluster.address
    if address is not None:
        probe(address)
        use_token()  # before the import, which reads it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers inherit the environment of a local cluster; one thread each unless a part asks for more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"address": "local", "include_dashboard": False}
    else:
        options |= {"address": address}
        if config.cluster.ship:
            options["runtime_env"] = {"py_modules": [str(Path(p).expanduser()) for p in config.cluster.ship]}
    try:
        ray.init(**options)
    except ValueError as error:
        raise ConfigError(f"cluster.address is {address!r}: {error}") from error
    except ConnectionError as error:
        raise RunFailed(
            f"no Ray cluster answers at cluster.address {address!r}, or it asks for another "
            f"token than ~/.ray/auth_token has: {str(error).splitlines()[0]}"
        ) from error


def probe(address: str) -> None:
    """Look whether anything listens at `host:port`. Raises RunFailed, or ConfigError for a wrong port."""
    host, colon, port = address.rpartition(":")
    host = host.rpartition("//")[2].strip("[]")
    if not colon or not host:
        return  # "auto", or something that Ray will name
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"cluster.address is {address!r}: {port!r} is no port; write host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_LIMIT_S).close()
    except OSError as error:
        raise RunFailed(
            f"nothing listens at cluster.address {address!r} ({error.strerror or error}): start a cluster "
            "there (ray start --head), or correct the address"
        ) from error


def use_token() -> None:
    """Show Ray's token to an existing cluster, where the person has one and has not said otherwise.

    `ray start` asks for a token by default, and `ray.init` with an address shows it only when told to. A
    cluster that was started without one lets such a process in, but does not get through to it: for that one
    say RAY_AUTH_MODE=disabled.
    """
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if given or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


# ---------------------------------------------------------------------- nodes


def check_nodes(config: Config, placement: Placement, run_folder: Path) -> None:
    """See that each node of an existing cluster where a part may run can run it. Raises ConfigError."""
    if config.cluster.address is None:
        return
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster: Any = ray
    wanted = placement.nodes()
    if config.cluster.transport == "shared_memory" and (wanted is None or len(wanted) > 1):
        raise ConfigError(
            "cluster.transport is shared_memory, which reaches one node, and the parts may be on more: set "
            "it to auto, or cluster.placement.strategy to strict_pack with an amount for each part"
        )
    nodes = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in cluster.nodes()
        if node["Alive"] and (wanted is None or node["NodeID"] in wanted)
    }
    look: Any = ray.remote(num_cpus=0, max_retries=0)(seen_here)
    paths = _named_paths(config, run_folder)
    looks = {
        node: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        ).remote([path for _, path in paths])
        for node in nodes
    }
    for node, reference in looks.items():
        where = f"node {nodes[node]} ({node[:8]})"
        try:
            version, missing = ray.get(reference, timeout=config.cluster.start_timeout_s)
        except RayError as error:
            raise ConfigError(
                f"{where} cannot run staleflow ({str(error).strip().splitlines()[-1]}): install the same "
                "version there, and send packages of your own with cluster.ship"
            ) from error
        if version != staleflow.__version__:
            raise ConfigError(
                f"{where} has staleflow {version}, and this is {staleflow.__version__}: "
                "install the same version"
            )
        for what, path in paths:
            if path in missing:
                raise ConfigError(
                    f"{where} does not see {path} ({what}): put it where every node sees it under this path"
                )


def seen_here(paths: Sequence[str]) -> tuple[str, list[str]]:
    """This node's version of staleflow, and those of `paths` that it does not see."""
    return staleflow.__version__, [path for path in paths if not os.path.exists(path)]


def _named_paths(config: Config, run_folder: Path) -> list[tuple[str, str]]:
    """What the config names that parts on other nodes read or write: key and path."""
    paths = [("the run folder, in run.output_dir", str(run_folder))]
    for key, value in (
        ("model.source", config.model.source),
        ("model.tokenizer", config.model.tokenizer),
        ("data.path", config.data.path),
        ("data.options.held_out_path", config.data.options.get("held_out_path")),
        ("training.kl.reference", config.training.kl.reference),
        ("training.critic.source", config.training.critic.source),
    ):
        if isinstance(value, str) and not value.startswith("builtin:"):
            paths.append((key, os.path.expanduser(value)))
    return paths
