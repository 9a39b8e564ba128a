"""What a simulated instance reports at once, what with its next report, and the order of events."""

from __future__ import annotations

import math

from staleflow.coordination.actions import Command, Interrupt, Pull, Route
from staleflow.coordination.cost_model import CostModel
from staleflow.data.instance_update import InstanceUpdate
from staleflow.simulation.event_queue import EventQueue
from staleflow.simulation.fleet import FleetMessage, SimulatedFleet
from staleflow.simulation.response_lengths import fixed
from staleflow.simulation.settings import ClusterSettings, TrainerCosts
from staleflow.simulation.stats import SimulationStats
from staleflow.simulation.store import SimulatedStore

ONE = ClusterSettings(
    instances=1,
    kv_capacity=220,
    max_running=2,
    costs=CostModel(k1=0, k2=1, k3=0, k4=0, prefill=0, pull=5),
    trainer=TrainerCosts(),
    group_size=4,
    lengths=fixed(100),
    prompt_length=10,
    max_new_tokens=100,
    report_s=0.25,
)


class Told:
    """A fleet of one instance with four trajectories to route, and what it tells: (time, acknowledged)."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        stats = SimulationStats()
        store = SimulatedStore(ONE, stats.tokens)
        self.reports: list[tuple[float, int]] = []
        self.fleet = SimulatedFleet(settings=ONE, queue=self.queue, store=store, stats=stats, tell=self.tell)
        self.fleet.start()
        (group,), _ = store.draw(1, padding=False)
        self.group = group
        self.seq = 0

    def tell(self, message: FleetMessage) -> None:
        if isinstance(message, InstanceUpdate):
            self.reports.append((self.queue.time, message.report.acked_seq))

    def go_on_until(self, time: float) -> None:
        self.queue.advance(time, ())

    def order(self, make: type[Command], **fields: object) -> None:
        self.seq += 1
        self.fleet.send(make(instance="instance-0", incarnation=1, seq=self.seq, **fields))  # type: ignore[arg-type]
        self.fleet.replan()

    def route(self, member: int) -> None:
        who = self.group.members[member]
        self.order(Route, trajectory_id=who, group_id=self.group.group_id, min_version=0, length=10)


def test_the_first_trajectory_of_an_empty_instance_is_told_at_once_the_second_with_the_next_report() -> None:
    told = Told()
    told.route(0)
    told.go_on_until(1.5)
    assert told.reports == [(0.25, 1)]
    told.route(1)  # taken in at the end of the step, at 2
    told.go_on_until(29.9)
    assert told.reports == [(0.25, 1)]
    told.go_on_until(30.5)
    assert told.reports == [(0.25, 1), (30.25, 2)], "with the lengths, every 30 s"


def test_that_one_has_to_wait_inside_or_leaves_or_that_weights_are_loaded_is_told_at_once() -> None:
    told = Told()
    for member in range(2):
        told.route(member)
    told.go_on_until(1.0)
    told.route(2)  # two run at most
    told.go_on_until(1.5)
    assert told.reports == [(0.25, 2), (1.25, 3)]
    told.order(Interrupt, trajectory_id=told.group.members[2], length=0)
    told.go_on_until(2.5)
    assert told.reports[2:] == [(2.25, 4)]
    told.fleet.version = 1
    told.order(Pull, version=1)  # from 3 to 8, and nothing is told meanwhile
    told.go_on_until(8.5)
    assert told.reports[3:] == [(8.25, 5)]


def test_of_one_moment_what_was_scheduled_first_happens_first_and_news_stops_the_clock() -> None:
    queue = EventQueue()
    seen: list[str] = []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        queue.schedule(at, seen.append, name)
    queue.advance(1.5, seen)
    assert (seen, queue.time, len(queue), queue.is_due) == (["a"], 1.0, 2, True)
    queue.advance(1.5, ())
    assert (seen, queue.time, len(queue), queue.is_due) == (["a", "b"], 1.5, 1, False)
    queue.advance(math.inf, ())
    assert (seen, queue.time, len(queue)) == (["a", "b", "c"], 2.0, 0)
    queue.advance(9.0, ())
    assert queue.time == 9.0
