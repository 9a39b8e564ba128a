"""The instances of a random cluster: engines that are watched, in processes that work, die and start anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster_settings import ClusterSettings, InstanceSettings
from cluster_watch import Watch

from staleflow.coordination.actions import Command
from staleflow.coordination.events import InstanceJoined
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.trajectory import Trajectory
from staleflow.errors import EngineError, TransportError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine
from staleflow.rollout.instance import RolloutInstance
from staleflow.rollout.scheduler import Generation
from staleflow.rollout.scripted_lengths import Lengths, long_tailed
from staleflow.runtime.backend import Message
from staleflow.simulation.event_queue import EventQueue

STOP_TOKEN = 0


class WatchedEngine(FakeEngine):
    """Says what enters and leaves, and forgets a trajectory now and then. Its tokens are cheap to compute."""

    def __init__(self, watch: Watch, name: str, forgets: Callable[[], bool], **options: Any) -> None:
        super().__init__(**options)
        self._watch, self._name, self._forgets = watch, name, forgets

    def _token(self, generation: Generation) -> int:
        position = generation.position
        if self._ends_at(generation, position + 1):
            return STOP_TOKEN
        return 1 + (sum(map(ord, generation.trajectory_id)) + position * position) % 15

    def _log_prob(self, generation: Generation) -> float:
        return -1.0

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        if self._forgets():
            return
        super().add(trajectory, greedy=greedy)
        self._watch.entered(self._name, trajectory.trajectory_id)

    def step(self) -> Sequence[Trajectory]:
        finished = super().step()
        for trajectory in finished:
            self._watch.left(self._name, trajectory.trajectory_id)
        return finished

    def interrupt(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        gone = super().interrupt(trajectory_ids)
        for trajectory in gone:
            self._watch.left(self._name, trajectory.trajectory_id)
        return gone


def remembered(lengths: Lengths) -> Lengths:
    """The same lengths, each computed once."""
    known: dict[tuple[str, int], int] = {}

    def length(trajectory: Trajectory) -> int:
        key = trajectory.trajectory_id, sum(not segment.generated for segment in trajectory.segments)
        if key not in known:
            known[key] = lengths(trajectory)
        return known[key]

    return length


@dataclass(slots=True)
class Node:
    """One incarnation of an instance as a process."""

    name: str
    incarnation: int
    settings: InstanceSettings
    now: float = 0.0
    engine: WatchedEngine = field(init=False)
    instance: RolloutInstance = field(init=False)
    inbox: list[tuple[Sequence[Command], Mapping[str, Trajectory]]] = field(default_factory=list)
    is_awake: bool = False
    is_dead: bool = False

    def spend(self, seconds: float) -> None:
        self.now += seconds


class VirtualTime:
    """A queue of calls by time, and channels of messages."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.rng = random.Random(f"run-{settings.seed}")
        self.clock = EventQueue()
        self._channels: dict[str, float] = {}

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.time

    def _foresee(self, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        self.clock.schedule(at, happen, *arguments)

    def _send(self, channel: str, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        """A message: it takes its time, and overtakes none in its channel."""
        arrival = max(self._channels.get(channel, 0.0), at + self.rng.random() * self.settings.delay)
        self._channels[channel] = arrival
        self._foresee(arrival, happen, *arguments)


class Instances(VirtualTime):
    """Every instance, and the weights that it may pull."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        self.watch = Watch(settings, lambda: self.now)
        self.nodes: dict[str, Node] = {}
        self.newest = -1
        """Version in the parameter server."""
        self.lengths = remembered(
            long_tailed(
                settings.median_response, settings.spread, settings.max_new_tokens, seed=settings.seed
            )
        )

    def _receive(self, message: Message) -> None:
        """Something arrives at the run loop."""
        raise NotImplementedError

    def _updated(self, node: Node, update: InstanceUpdate) -> None:
        """A report arrives."""
        raise NotImplementedError

    def _down(self, node: Node, reason: str) -> None:
        """It is known that an instance has died."""
        raise NotImplementedError

    def _start(self, number: int, incarnation: int) -> None:
        name, settings = f"i{number}", self.settings.instances[number]
        node = Node(name, incarnation, settings, now=self.now)
        node.engine = WatchedEngine(
            self.watch,
            name,
            lambda: self.rng.random() < self.settings.losses,
            sampling=SamplingParams(stop_token_ids=(STOP_TOKEN,), max_model_len=self.settings.longest),
            seed=self.settings.seed,
            kv_capacity_tokens=settings.kv_capacity,
            max_running=settings.max_running,
            version=self.newest,
            lengths=self.lengths,
            seconds_per_step=settings.costs,
            spend=node.spend,
        )
        node.instance = RolloutInstance(
            instance=name,
            incarnation=incarnation,
            engine=node.engine,
            subscriber=Source(self, number),
            on_pull=settings.on_pull,
            clock=lambda: node.now,
            progress_interval_s=self.settings.progress_interval_s,
        )
        self.nodes[name] = node
        joined = InstanceJoined(
            instance=name,
            incarnation=incarnation,
            version=node.engine.version,
            kv_capacity=settings.kv_capacity,
            max_running=settings.max_running,
        )
        self._send(f"from {name}", self.now, self._receive, joined)

    def _deliver(self, name: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        node = self.nodes[name]
        node.inbox.append((commands, payloads))
        if not node.is_awake:
            node.is_awake = True
            self._foresee(max(self.now, node.now), self._work, node)

    def _work(self, node: Node) -> None:
        """Apply what has come, and decode one step."""
        if node.is_dead:
            return
        node.now = max(node.now, self.now)
        try:
            for commands, payloads in node.inbox:
                node.instance.apply(commands, payloads)
            node.inbox.clear()
            if self.rng.random() < self.settings.deaths:
                raise EngineError("it dies by chance")
            node.instance.advance()
        except EngineError as error:
            self._die(node, str(error))
            return
        if node.instance.has_news:
            self._send(f"from {node.name}", node.now, self._updated, node, node.instance.take_report())
        node.is_awake = not node.instance.is_idle
        if node.is_awake:
            self._foresee(max(node.now, self.now + 1e-4), self._work, node)

    def _die(self, node: Node, reason: str) -> None:
        """Reports on their way arrive, or are lost with it; Control is told after them."""
        node.is_dead = True
        node.engine.close()
        self._send(f"from {node.name}", self.now, self._down, node, reason)
        self._foresee(
            self.now + self.settings.restart_s, self._start, int(node.name[1:]), node.incarnation + 1
        )


class Source:
    """The parameter server as one instance sees it."""

    def __init__(self, cluster: Instances, number: int) -> None:
        self._cluster, self._number = cluster, number

    def newest(self) -> int | None:
        """Newest version there."""
        return self._cluster.newest

    @contextmanager
    def lease(self, version: int | None = None) -> Iterator[Any]:
        """The newest version, unless the pull is refused."""
        cluster, outage = self._cluster, self._cluster.settings.outage
        if outage is not None and outage[0] == self._number and outage[1] <= cluster.now < outage[2]:
            raise TransportError("nobody answers")
        if cluster.rng.random() < cluster.settings.refusals:
            raise TransportError("500")
        yield SimpleNamespace(version=cluster.newest, tensors={})
