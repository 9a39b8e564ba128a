"""The cluster of one run: an existing or a local one, with places reserved for the run's actors.

Invariants: a refused run leaves neither a local cluster nor a reservation; `close` frees all resources and
ends a local cluster.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

from staleflow.config.schema import Config
from staleflow.runtime.backends.ray.connect import connect
from staleflow.runtime.backends.ray.nodes import check_nodes
from staleflow.runtime.backends.ray.placement import Placement, make_placement


class RayCluster:
    """See the module."""

    def __init__(self, placement: Placement, *, is_local: bool) -> None:
        self.placement = placement
        self.is_local = is_local
        """Whether this process started it, so that `close` ends it."""
        self._closed = False

    def close(self) -> None:
        """Free the places and disconnect. May be called twice."""
        if not self._closed:
            self._closed = True
            _leave(self.placement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def reserve(config: Config, run_folder: Path) -> RayCluster:
    """Connect, reserve places, and check that every node can run its parts.

    Raises ConfigError if the config cannot work on this cluster; RunFailed if no cluster answers, or others
    use it for longer than cluster.placement.wait_s.
    """
    connect(config)
    placement = Placement()
    try:
        placement = make_placement(config)
        if config.cluster.address is not None:
            check_nodes(config, placement, run_folder)
    except BaseException:
        _leave(placement)
        raise
    return RayCluster(placement, is_local=config.cluster.address is None)


def _leave(placement: Placement) -> None:
    import ray

    with contextlib.suppress(Exception):  # the cluster may be gone
        placement.remove()
    ray.shutdown()
