"""Which holder has the weights on which node: the parameter server of a run on several nodes.

Invariants:

- a node gets a holder when a process there first asks for one, and another when that one has died; so a node
  that comes back or joins has the newest version as soon as anybody there wants it;
- no node waits for another: a push is told to all holders and nobody is waited for.

::

    trainer -- push --> [store of its node] -- pushed(v) --> WeightDirectory -- tell(v) --> holders
                               ^ pieces, each at its own pace                                 |
                               +--------------------------------------------------------------+

The directory is an actor of its own and knows where weights are, never the weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from staleflow.errors import ConfigError, TransportError, UserError
from staleflow.servers.direct import DIRECT
from staleflow.servers.holder import HOLDER_GROUPS, HolderUp, WeightHolder
from staleflow.servers.nodes import NodeHandle
from staleflow.servers.shared_memory import SharedMemoryHandle

START_LIMIT_S = 120.0
"""A holder starts in seconds (with the direct transport it loads torch), on a crowded machine in more."""
LIFE_LIMIT_S = 10.0
"""How long a holder may take to give a sign of life."""
CLOSE_LIMIT_S = 3.0

Transport = Literal["auto", "object_store", "device"]

DIRECTORY_GROUPS = {"life": 1, "stores": 32}
"""Threads of the directory, by group of calls."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holder:
    actor: Any
    up: HolderUp
    follows: bool = False
    """It has been told the source."""
    told: Any = None
    """The last call that told it of a version."""


class WeightDirectory:
    """See the module. A Ray actor with `DIRECTORY_GROUPS`."""

    def __init__(self, log_as: Callable[[str], None] | None = None) -> None:
        """`log_as(part)` begins the log of a holder's process. Picklable."""
        self._log_as = log_as

    def start(
        self, run_name: str, directory: str | None, *, transport: Transport, piece_bytes: int
    ) -> NodeHandle:
        """Returns how the other processes connect. Raises ConfigError when `transport` cannot work."""
        if transport == "device" and not DIRECT.installed():
            raise ConfigError(
                "cluster.transport is device, which needs the package nixl on every node: install it, or set "
                "object_store"
            )
        self._run_name = run_name
        self._directory = directory
        self._piece_bytes = piece_bytes
        self._transport = transport
        self._probe_direct = transport != "object_store" and DIRECT.installed()
        self._holders: dict[str, _Holder] = {}
        self._source: str | None = None
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._all = threading.Lock()
        return NodeHandle(ray.get_runtime_context().current_actor)

    @ray.method(concurrency_group="life")
    def live(self, wait_s: float) -> None:
        """A sign of life after a while."""
        time.sleep(wait_s)

    @ray.method(concurrency_group="stores")
    def store(self, node: str, *, source: bool = False) -> tuple[SharedMemoryHandle, Any]:
        """The store of a node and its holder, made now if there is none. `source`: it is pushed to there.

        Raises ConfigError when the node's shared memory cannot be used, TransportError when no holder starts.
        """
        with self._all:
            lock = self._locks[node]
        with lock:
            holder = self._holders.get(node)
            if holder is None or not _lives(holder.actor, patient=node == self._source):
                holder = self._start_holder(node)
                with self._all:
                    self._holders[node] = holder
        if source:
            self._set_source(node)
        elif self._source is not None:
            self._have_follow(node, holder)
        return holder.up.handle, holder.actor

    @ray.method(concurrency_group="stores")
    def pushed(self, version: int) -> None:
        """The source has `version`; whoever is dead is forgotten."""
        with self._all:
            for node, holder in list(self._holders.items()):
                if node != self._source and _has_died(holder.told):
                    _log.warning("the weights' holder on node %s is gone", node)
                    del self._holders[node]
                else:
                    holder.told = holder.actor.tell.remote(version)

    def close(self) -> None:
        """Remove the stores of all nodes that answer; the others go with their processes."""
        with self._all:
            closing = [holder.actor.close.remote() for holder in self._holders.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_LIMIT_S)

    def _start_holder(self, node: str) -> _Holder:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "concurrency_groups": HOLDER_GROUPS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        if self._probe_direct:
            options["enable_tensor_transport"] = True
        make: Any = ray.remote(**options)(WeightHolder)
        actor = make.remote()
        start = actor.start.remote(
            node=node,
            run_name=self._run_name,
            directory=self._directory,
            piece_bytes=self._piece_bytes,
            probe_direct=self._probe_direct,
            log_as=self._log_as,
        )
        try:
            up: HolderUp = ray.get(start, timeout=START_LIMIT_S)
            if self._transport == "device" and not up.direct:
                raise ConfigError(
                    f"cluster.transport is device, but nixl does not start on node {node}: set object_store"
                )
        except RayTaskError as error:
            ray.kill(actor)
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except (RayError, ConfigError) as error:
            ray.kill(actor)
            if isinstance(error, ConfigError):
                raise
            raise TransportError(f"no store for weights starts on node {node}: {error}") from error
        _log.info("weights on node %s: %s", node, up.handle.folder)
        return _Holder(actor, up)

    def _set_source(self, node: str) -> None:
        with self._all:
            self._source = node
            others = [(n, h) for n, h in self._holders.items() if n != node]
        for other, holder in others:
            self._have_follow(other, holder)

    def _have_follow(self, node: str, holder: _Holder) -> None:
        assert self._source is not None
        if node == self._source or holder.follows:
            return
        holder.follows = True
        source = self._holders[self._source]
        direct = source.up.direct and holder.up.direct
        holder.actor.follow.remote(source.actor, direct)
        _log.info(
            "weights to node %s go by %s", node, "direct transport (nixl)" if direct else "Ray's object store"
        )


def _lives(actor: Any, *, patient: bool) -> bool:
    """`patient`: one that is only slow lives. For the source, whose store the trainer goes on pushing to."""
    try:
        ray.get(actor.live.remote(), timeout=LIFE_LIMIT_S)
    except GetTimeoutError:
        return patient
    except RayError:
        return False
    return True


def _has_died(call: Any) -> bool:
    """A call that came back with the death of its actor."""
    if call is None:
        return False
    ready, _ = ray.wait([call], timeout=0)
    if not ready:
        return False
    try:
        ray.get(call)
    except RayActorError:
        return True
    except RayError:
        return False
    return False
