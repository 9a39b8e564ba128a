"""Maps each node to its weight holder: the parameter server of a run on several nodes.

Invariants:

- a node gets a holder when one of its processes first asks for one, and a new one when that has died; so a
  node that joins or returns has the newest version as soon as one of its processes needs it;
- no node waits for another: a push is announced to all holders without waiting for any.

::

    trainer -- push --> [store of its node] -- pushed(v) --> WeightDirectory -- tell(v) --> holders
                               ^ pieces, each at its own pace                                 |
                               +--------------------------------------------------------------+

The directory is a separate actor. It knows where weights are and never handles the weights themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from staleflow.errors import ConfigError, TransportError, UserError
from staleflow.servers.direct import DIRECT
from staleflow.servers.holder import HOLDER_GROUPS, HolderUp, WeightHolder
from staleflow.servers.nodes import NodeHandle
from staleflow.servers.shared_memory import SharedMemoryHandle

START_LIMIT_S = 120.0
"""A holder starts in seconds (with the direct transport it loads torch); a busy machine needs longer."""
LIFE_LIMIT_S = 10.0
"""A holder must answer a liveness check within this time."""
CLOSE_LIMIT_S = 3.0

NodeTransport = Literal["auto", "object_store", "device"]
NODE_TRANSPORTS: tuple[str, ...] = get_args(NodeTransport)
"""Ways between nodes. auto: device where it works, else object_store."""

DIRECTORY_GROUPS = {"life": 1, "stores": 32}
"""Threads of the directory, by concurrency group."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holder:
    actor: Any
    up: HolderUp
    follows: bool = False
    """It knows its source and keeps up with it."""
    announcement: Any = None
    """The last call that announced a version to it."""


class WeightDirectory:
    """See the module. A Ray actor with `DIRECTORY_GROUPS`."""

    def __init__(self, log_as: Callable[[str], None] | None = None) -> None:
        """`log_as(part)` opens the log of a holder's process. Picklable."""
        self._log_as = log_as

    def start(
        self, run_name: str, directory: str | None, *, transport: NodeTransport, piece_bytes: int
    ) -> NodeHandle:
        """Returns the handle for other processes. Raises ConfigError if `transport` cannot work."""
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
        """Liveness check: returns after `wait_s`."""
        time.sleep(wait_s)

    @ray.method(concurrency_group="stores")
    def store(self, node: str, *, source: bool = False) -> tuple[SharedMemoryHandle, Any]:
        """The store of a node and its holder, created if missing. `source`: the trainer pushes on this node.

        Raises ConfigError if the node's shared memory cannot be used, TransportError if the holder does not
        start.
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
        """Announce `version` of the source to all holders, and forget the dead ones."""
        with self._all:
            for node, holder in list(self._holders.items()):
                if node != self._source and _has_died(holder.announcement):
                    _log.warning("the weight holder on node %s has died", node)
                    del self._holders[node]
                else:
                    holder.announcement = holder.actor.tell.remote(version)

    def close(self) -> None:
        """Remove the stores of all nodes that answer; the others end with their processes."""
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
            raise TransportError(f"the weight holder on node {node} did not start: {error}") from error
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
            "weights reach node %s by %s", node, "direct transport (nixl)" if direct else "Ray's object store"
        )


def _lives(actor: Any, *, patient: bool) -> bool:
    """Whether a holder lives. `patient`: a slow one counts as alive, for the source that the trainer uses."""
    try:
        ray.get(actor.live.remote(), timeout=LIFE_LIMIT_S)
    except GetTimeoutError:
        return patient
    except RayError:
        return False
    return True


def _has_died(call: Any) -> bool:
    """Whether `call` has ended because its actor died."""
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
