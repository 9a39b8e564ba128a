"""The instances of a random cluster: engines that are watched, in processes that work, die and start anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster_channels import Channels
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
from staleflow.telemetry.events import InstanceDown

STOP_TOKEN = 0


class WatchedEngine(FakeEngine):
    """Says what enters and leaves, and forgets trajectories, new ones and finished ones, now and then.

    Its tokens are cheap to compute.
    """

    def __init__(self, watch: Watch, name: str, forgets: Callable[[str], bool], **options: Any) -> None:
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
        if self._forgets(trajectory.trajectory_id):
            return
        super().add(trajectory, greedy=greedy)
        self._watch.entered(self._name, trajectory.trajectory_id)

    def step(self) -> Sequence[Trajectory]:
        finished = super().step()
        for trajectory in finished:
            self._watch.left(self._name, trajectory.trajectory_id)
        return [t for t in finished if not self._forgets(t.trajectory_id)]

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


class Instances:
    """Every instance, and the weights that it may pull. `tell` takes messages for the run loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        clock: EventQueue,
        rng: random.Random,
        channels: Channels,
        watch: Watch,
        tell: Callable[[Message], None],
        lengths: Lengths | None,
    ) -> None:
        """`lengths`: of the responses; None: as the settings say."""
        self.settings = settings
        self.clock = clock
        self.rng = rng
        self.nodes: dict[str, Node] = {}
        self.newest = -1
        """Version in the parameter server."""
        self.told_tokens = 0
        """Generated tokens in all reports that arrived."""
        self._watch = watch
        self._tell = tell
        self._channels = channels
        self._lengths = lengths or remembered(
            long_tailed(
                settings.median_response, settings.spread, settings.max_new_tokens, seed=settings.seed
            )
        )

    def start(self) -> None:
        """All of them."""
        for number in range(len(self.settings.instances)):
            self._start(number, 1)

    def close(self) -> None:
        """End every engine."""
        for node in self.nodes.values():
            node.is_dead = True
            node.engine.close()

    def send(self, name: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Commands are on their way; now and then they arrive twice."""
        for _ in range(1 + (self.rng.random() < self.settings.repeats)):
            self._channels.send(f"to {name}", self.clock.time, self._deliver, name, commands, payloads)

    def _forgets(self, trajectory_id: str) -> bool:
        return trajectory_id == self.settings.always_lost or self.rng.random() < self.settings.losses

    def _start(self, number: int, incarnation: int) -> None:
        name, settings = f"i{number}", self.settings.instances[number]
        node = Node(name, incarnation, settings, now=self.clock.time)
        node.engine = WatchedEngine(
            self._watch,
            name,
            self._forgets,
            sampling=SamplingParams(stop_token_ids=(STOP_TOKEN,), max_model_len=self.settings.longest),
            seed=self.settings.seed,
            kv_capacity_tokens=settings.kv_capacity,
            max_running=settings.max_running,
            version=self.newest,
            lengths=self._lengths,
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
        self._channels.send(f"from {name}", self.clock.time, self._tell, joined)

    def _deliver(self, name: str, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        node = self.nodes[name]
        node.inbox.append((commands, payloads))
        if not node.is_awake:
            node.is_awake = True
            self.clock.schedule(max(self.clock.time, node.now), self._work, node)

    def _work(self, node: Node) -> None:
        """Apply what has come, and decode one step."""
        if node.is_dead:
            return
        node.now = max(node.now, self.clock.time)
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
            update = node.instance.take_report()
            self._channels.send(f"from {node.name}", node.now, self._report, node, update)
        node.is_awake = not node.instance.is_idle
        if node.is_awake:
            self.clock.schedule(max(node.now, self.clock.time + 1e-4), self._work, node)

    def _report(self, node: Node, update: InstanceUpdate) -> None:
        if node.is_dead and self.rng.random() < 0.5:
            return
        self.told_tokens += sum(len(delta.segment.tokens) for delta in update.deltas)
        self._tell(update)

    def _die(self, node: Node, reason: str) -> None:
        """Reports on their way arrive, or are lost with it; that it is down is known after them."""
        node.is_dead = True
        node.engine.close()
        now = self.clock.time
        down = InstanceDown(instance=node.name, incarnation=node.incarnation, reason=reason)
        self._channels.send(f"from {node.name}", now, self._tell, down)
        number, incarnation = int(node.name[1:]), node.incarnation + 1
        self.clock.schedule(now + self.settings.restart_s, self._start, number, incarnation)


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
        if outage is not None and outage[0] == self._number and outage[1] <= cluster.clock.time < outage[2]:
            raise TransportError("no answer")
        if cluster.rng.random() < cluster.settings.refusals:
            raise TransportError("500")
        yield SimpleNamespace(version=cluster.newest, tensors={})
