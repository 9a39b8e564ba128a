"""A read-only view of `Control`: all that the rest of the project may know of its state.

The view holds references and computes on reading, so it costs `Control` nothing per event. Everything that it
returns is a plain or immutable value.
"""

from __future__ import annotations

from staleflow.coordination.actions import Command
from staleflow.coordination.batches import Batches
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.fleet import Fleet
from staleflow.coordination.snapshot import InstanceSnapshot
from staleflow.coordination.timing import CycleClock
from staleflow.coordination.trajectory_table import TrajectoryTable
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.protocol.records import EndReason


class ControlView:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        buffer: StalenessBuffer,
        trajectories: TrajectoryTable,
        fleet: Fleet,
        batches: Batches,
        costs: OnlineCosts,
        clock: CycleClock,
    ) -> None:
        self._buffer = buffer
        self._trajectories = trajectories
        self._fleet = fleet
        self._batches = batches
        self._costs = costs
        self.clock = clock
        """When the next cycle is due. Read it, and change nothing."""

    # ------------------------------------------------------------------ the run

    @property
    def finished(self) -> EndReason | None:
        """Why the run is over; None while it continues."""
        return self._batches.finished

    @property
    def stopping(self) -> bool:
        """Whether the run ends after the step in training."""
        return self._batches.stopping

    @property
    def newest_version(self) -> int:
        """Newest weight version pushed; -1 before the first push."""
        return self._batches.newest_version

    @property
    def trainer_idle(self) -> bool:
        """Whether the trainer has the weights of the next step and waits for its batch."""
        return self._batches.trainer_idle

    # ------------------------------------------------------------------ the staleness buffer

    @property
    def bound(self) -> int:
        """Staleness bound, in weight versions."""
        return self._buffer.bound

    @property
    def batch_size(self) -> int:
        """Groups per training step."""
        return self._buffer.batch_size

    @property
    def next_buffer(self) -> int:
        """The training step whose batch is consumed next."""
        return self._buffer.next_buffer

    def placement(self) -> tuple[tuple[int, int], ...]:
        """(reserved, occupied) firm groups of buffer next_buffer + k, for k = 0..bound."""
        return self._buffer.placement()

    def by_deadline(self) -> tuple[tuple[int, int], ...]:
        """(reserved, occupied) firm groups of deadline next_buffer + k, for k = 0..bound."""
        return self._buffer.by_deadline()

    @property
    def firm_count(self) -> int:
        """Firm groups in the buffer."""
        return self._buffer.firm_count

    @property
    def spare_count(self) -> int:
        """Spare groups in the buffer."""
        return self._buffer.spare_count

    @property
    def spare_limit(self) -> int:
        """Most spare groups at once."""
        return self._buffer.spare_limit

    @property
    def reservable(self) -> int:
        """Firm groups that may still be reserved before the run's last step."""
        return self._batches.reservable

    @property
    def spares_free(self) -> int:
        """Spare groups that may still be reserved."""
        return self._batches.spares_free

    # ------------------------------------------------------------------ trajectories

    def count(self, state: TrajectoryState) -> int:
        """Number of living trajectories in a state."""
        return self._trajectories.count(state)

    def lags(self, newest: int, *, occupied: bool) -> list[int]:
        """Versions by which reserved groups, occupied or not, lag behind `newest`."""
        return [
            newest - group.version
            for group in self._trajectories.groups()
            if group.version is not None and group.occupied is occupied
        ]

    # ------------------------------------------------------------------ instances

    def instances(self) -> tuple[str, ...]:
        """Names of the instances that are up, in order of joining."""
        return self._fleet.names()

    def is_current(self, instance: str, incarnation: int) -> bool:
        """Whether this incarnation is the one that is up."""
        return self._fleet.is_current(instance, incarnation)

    def instance(self, name: str) -> InstanceSnapshot:
        """An instance as it last reported itself."""
        return self._fleet.snapshot(name)

    def outstanding(self, instance: str) -> tuple[Command, ...]:
        """Commands that the instance has not acknowledged, oldest first."""
        return self._fleet.views()[instance].outstanding

    def resident(self, instance: str) -> tuple[str, ...]:
        """Trajectories ordered to the instance that have not left it."""
        return self._fleet.resident(instance)

    # ------------------------------------------------------------------ costs

    @property
    def cost_model(self) -> CostModel:
        """The present cost model."""
        return self._costs.model

    @property
    def cost_error(self) -> float | None:
        """Mean relative error of the cost model over the last observations; None before the first."""
        return self._costs.error
