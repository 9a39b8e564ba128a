"""From a simulated cluster to the observer and the journal of a run: the same rows and lines as a real run's.

Invariant: lengths are those that the coordinator knows, as in a real run: what an instance has reported.
Control takes no simulated time, so `coord/...seconds` of Control are 0 here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from staleflow.coordination.actions import Command, Train
from staleflow.coordination.control import Control
from staleflow.coordination.events import DrawnGroup, InstanceJoined, InstanceLost, InstanceReport
from staleflow.data.trajectory import FinishReason, Reward
from staleflow.protocol.records import Trained
from staleflow.runtime.backend import StepTrained
from staleflow.runtime.length_counts import Late
from staleflow.runtime.observer import Observer
from staleflow.simulation.cluster import SimulatedCluster
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.simulation.watch import Watch
from staleflow.storage.journal import JournalWriter
from staleflow.training.trainer import TrainedTrajectory, TrainResult


class SimulatedClock:
    """The simulated seconds of a cluster; both readings are these."""

    def __init__(self) -> None:
        self._cluster: SimulatedCluster | None = None

    def follow(self, cluster: SimulatedCluster) -> None:
        """From now on."""
        self._cluster = cluster

    def now(self) -> float:
        """Simulated seconds from the start."""
        return 0.0 if self._cluster is None else self._cluster.now

    def wall(self) -> float:
        """The same: a simulated run is repeated to the bit."""
        return self.now()

    def cpu(self) -> float:
        """The same: deciding takes no simulated time."""
        return self.now()

    def sleep(self, seconds: float) -> None:
        """Nobody waits in a simulation."""
        raise RuntimeError("simulated time passes by events only")


class SimulatedResponse(NamedTuple):
    """A `data.responses.Response`, as far as it is known now."""

    trajectory_id: str
    prompt_len: int
    response_len: int
    finish_reason: FinishReason | None
    min_version: int | None
    max_version: int | None


class ScoredResponse(NamedTuple):
    """A `data.responses.Scored`."""

    trajectory: SimulatedResponse
    reward: Reward


class SimulatedBalance:
    """A `data.responses.Balance` of a cluster."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def as_dict(self) -> dict[str, int]:
        """As far as decoding has come."""
        return self._cluster.balance()


class RunWatch(Watch):
    """Feeds observer and journal."""

    def __init__(
        self,
        *,
        control: Control,
        clock: SimulatedClock,
        observer: Observer,
        journal: JournalWriter,
        stopwatch: Callable[[], float],
    ) -> None:
        """`stopwatch` gives real seconds."""
        self._stopwatch = stopwatch
        self._began = stopwatch()
        self._control = control
        self._clock = clock
        self._observer = observer
        self._journal = journal
        self._cluster: SimulatedCluster
        self._balance: SimulatedBalance
        self._rewards: dict[str, Reward] = {}
        """Of scored trajectories that are neither trained nor dropped."""
        self._failed: set[str] = set()
        self._dropped: dict[str, tuple[SimulatedTrajectory, int]] = {}
        """What an instance still holds of dropped trajectories: they, and the length known when dropped."""

    def begin(self, cluster: SimulatedCluster) -> None:
        """All parts are up at once."""
        self._cluster, self._balance = cluster, SimulatedBalance(cluster)
        self._clock.follow(cluster)
        self._observer.phase("running")

    def cycled(self) -> None:
        """See `Watch`, as for all of these."""
        self._observer.tick(self._control, self._balance)

    def command(self, command: Command) -> None:
        self._observer.command(command)
        self._journal.command(command)

    def joined(self, event: InstanceJoined) -> None:
        self._observer.instance_up(event.instance)
        self._journal.joined(event)

    def lost(self, event: InstanceLost) -> None:
        self._observer.instance_down(event.instance, event.reason)
        self._journal.lost(event)
        for trajectory_id, _ in event.lengths:
            self._dropped.pop(trajectory_id, None)

    def reported(self, report: InstanceReport) -> None:
        self._observer.reported(report, self._late(report) if self._dropped else ())
        if self._journal.is_on:
            runs = {}
            for left in (*report.interrupted, *report.finished):
                trajectory = self._cluster.find(left.trajectory_id)
                if trajectory is not None:
                    runs[left.trajectory_id] = tuple(trajectory.runs)
            self._journal.reported(report, runs)

    def _late(self, report: InstanceReport) -> list[Late]:
        """What a report has of trajectories that were dropped before it came."""
        finished = [t.trajectory_id for t in report.finished]
        late = []
        for trajectory_id in (*finished, *(t.trajectory_id for t in report.interrupted), *report.aborted):
            known = self._dropped.pop(trajectory_id, None)
            if known is not None:
                trajectory, before = known
                late.append(Late(trajectory_id, trajectory.base - before, trajectory_id in finished))
        return late

    def drawn(self, groups: Sequence[DrawnGroup]) -> None:
        self._journal.drawn(groups)

    # ------------------------------------------------------------------ trajectories

    def scoring(self, trajectory_id: str) -> None:
        self._observer.sampled(self._known(trajectory_id))

    def scored(self, trajectory_id: str, raw: float, usable: bool, seconds: float) -> None:
        status = "ok" if usable else "failed"
        reward = Reward(raw=raw, status=status, usable=usable, seconds=seconds)
        self._rewards[trajectory_id] = reward
        self._observer.scored([reward])
        self._journal.scored(trajectory_id, raw, status, seconds)

    def discarded(self, trajectory_ids: Sequence[str], reason: str) -> None:
        self._observer.discarded(reason, [self._drop(t) for t in trajectory_ids])
        self._journal.released(trajectory_ids, reason)

    def resampled(self, trajectory_id: str, new_id: str, reason: str) -> None:
        self._observer.resampled(self._drop(trajectory_id), reason)
        self._journal.resampled(trajectory_id, new_id, reason)

    def truncated(self, trajectory_id: str, reason: str) -> None:
        self._observer.truncated(self._known(trajectory_id), reason)
        self._journal.truncated(trajectory_id, reason)

    def gave_up(self, trajectory_id: str, reason: str) -> None:
        self._failed.add(trajectory_id)
        self._journal.gave_up(trajectory_id, reason)
        self._observer.event("gave_up", f"trajectory {trajectory_id} is masked: {reason}")

    def _drop(self, trajectory_id: str) -> SimulatedResponse:
        """The trajectory as it is known when it is dropped."""
        known = self._known(trajectory_id)
        self._rewards.pop(trajectory_id, None)
        self._failed.discard(trajectory_id)
        trajectory = self._living(trajectory_id)
        if trajectory.instance is not None:
            self._dropped[trajectory_id] = trajectory, trajectory.reported
        return known

    def _known(self, trajectory_id: str) -> SimulatedResponse:
        return self._seen(self._living(trajectory_id))

    def _living(self, trajectory_id: str) -> SimulatedTrajectory:
        trajectory = self._cluster.find(trajectory_id)
        assert trajectory is not None, trajectory_id
        return trajectory

    def _seen(self, trajectory: SimulatedTrajectory) -> SimulatedResponse:
        reason = None
        if trajectory.trajectory_id in self._failed:
            reason = FinishReason.FAILED
        elif trajectory.reported >= trajectory.target:
            reason = FinishReason.LENGTH if trajectory.truncated else FinishReason.STOP
        return SimulatedResponse(
            trajectory_id=trajectory.trajectory_id,
            prompt_len=trajectory.prompt,
            response_len=trajectory.reported - trajectory.prompt,
            finish_reason=reason,
            min_version=trajectory.min_version,
            max_version=trajectory.max_version,
        )

    # ------------------------------------------------------------------ training

    def batch(self, action: Train, members: Sequence[SimulatedTrajectory], waited_s: float) -> None:
        coming = iter(members)
        groups = [[self._trainable(next(coming)) for _ in ids] for _, ids in action.groups]
        self._observer.batch(action.step, groups, waited_s)
        self._journal.batch(action.step, waited_s)

    def _trainable(self, trajectory: SimulatedTrajectory) -> ScoredResponse:
        seen = self._seen(trajectory)
        self._failed.discard(trajectory.trajectory_id)
        return ScoredResponse(trajectory=seen, reward=self._rewards.pop(trajectory.trajectory_id))

    def trained(self, record: Trained, update_s: float, push_s: float) -> None:
        trained = tuple(
            [
                TrainedTrajectory(
                    trajectory_id=t.id,
                    min_version=t.min,
                    max_version=t.max,
                    tokens=t.tokens,
                    token_hash=t.hash,
                )
                for t in record.trajectories
            ]
        )
        result = TrainResult(version_start=record.step, version=record.step + 1, trained=trained, metrics={})
        message = StepTrained(result=result, update_s=update_s, push_s=push_s)
        self._observer.trained(message, self._control, self._balance)
        self._journal.trained(record.step, update_s, push_s)

    def pushed(self, version: int) -> None:
        self._journal.pushed(version)

    # ------------------------------------------------------------------ the end

    def finished(self, reason: str) -> None:
        self._observer.event("finish", reason)
        self._journal.finished(reason)

    def ended(self) -> None:
        real_s = self._stopwatch() - self._began
        speed = self._clock.now() / max(1e-9, real_s)
        extra = {"simulation/wall_s": real_s, "simulation/speed": speed}
        self._observer.finish(self._control, self._balance, extra)
