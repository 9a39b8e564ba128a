"""Checks the nodes of an existing cluster before the run creates anything.

Invariant: every node on which a part may run has this version of staleflow and sees the files that the config
names; otherwise the run is refused with the node's address.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import staleflow
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.runtime.backends.ray.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A node's report about itself."""

    version: str
    """Version of staleflow on the node."""
    missing_paths: tuple[str, ...]


def check_nodes(config: Config, placement: Placement, run_folder: Path) -> None:
    """Check each node on which a part may run. `run_folder` need not exist yet. Raises ConfigError."""
    wanted = placement.nodes()
    if config.cluster.transport == "shared_memory" and (wanted is None or len(wanted) > 1):
        raise ConfigError(
            "cluster.transport is shared_memory, which works on one node, but the parts may be on more: set "
            "it to auto, or cluster.placement.strategy to strict_pack with an amount for each part"
        )
    with _probe_file(run_folder) as probe:
        paths = [("the run folder, in run.output_dir", str(probe)), *_named_paths(config)]
        for node, report in _reports(config, wanted, [path for _, path in paths]):
            if problem := node_problem(report, paths):
                # The message names the folder in place of the probe.
                raise ConfigError(f"{node} {problem}".replace(str(probe), str(run_folder)))


def node_problem(report: NodeReport, paths: Sequence[tuple[str, str]]) -> str:
    """The problem of a node, or "". `paths`: pairs of a config key and the path that it names."""
    if report.version != staleflow.__version__:
        return (
            f"has staleflow {report.version}, but this is {staleflow.__version__}: install the same version"
        )
    for what, path in paths:
        if path in report.missing_paths:
            return f"does not see {path} ({what}): put it where every node sees it under this path"
    return ""


def report_node(paths: Sequence[str]) -> NodeReport:
    """Runs on the node."""
    return NodeReport(
        version=staleflow.__version__,
        missing_paths=tuple(path for path in paths if not os.path.exists(path)),
    )


def _reports(
    config: Config, wanted: set[str] | None, paths: Sequence[str]
) -> Iterator[tuple[str, NodeReport]]:
    """Name and report of each node in `wanted`; None: of all nodes. Raises ConfigError."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster: Any = ray
    nodes = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in cluster.nodes()
        if node["Alive"] and (wanted is None or node["NodeID"] in wanted)
    }
    task: Any = ray.remote(num_cpus=0, max_retries=0)(report_node)
    tasks = {
        node: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        ).remote(paths)
        for node in nodes
    }
    for node, reference in tasks.items():
        name = f"node {nodes[node]} ({node[:8]})"
        try:
            yield name, ray.get(reference, timeout=config.cluster.start_timeout_s)
        except RayError as error:
            raise ConfigError(
                f"{name} cannot run staleflow ({str(error).strip().splitlines()[-1]}): install the same "
                "version there, and send packages of your own with cluster.ship"
            ) from error


@contextmanager
def _probe_file(run_folder: Path) -> Iterator[Path]:
    """A temporary file in the run folder or, if that does not exist yet, in its nearest existing parent.

    A node that sees it will see the folder.
    """
    parent = run_folder
    while not parent.is_dir():
        parent = parent.parent
    with tempfile.NamedTemporaryFile(dir=parent, prefix=".staleflow-probe-") as file:
        yield Path(file.name)


def _named_paths(config: Config) -> list[tuple[str, str]]:
    """(config key, path) of all files that parts on other nodes read."""
    named = (
        ("model.source", config.model.source),
        ("model.tokenizer", config.model.tokenizer),
        ("data.path", config.data.path),
        ("data.options.held_out_path", config.data.options.get("held_out_path")),
        ("training.kl.reference", config.training.kl.reference),
        ("training.critic.source", config.training.critic.source),
    )
    return [
        (key, os.path.expanduser(value))
        for key, value in named
        if isinstance(value, str) and not value.startswith("builtin:")
    ]
