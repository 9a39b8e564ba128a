"""What a simulated cluster tells whoever looks on, at the moment it happens.

Invariant: looking on changes nothing. Trajectories are told by their ids; `cluster.find` has them, also while
they are told to be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from staleflow.coordination.actions import Command, Train
from staleflow.coordination.events import DrawnGroup, InstanceJoined, InstanceLost, InstanceReport
from staleflow.protocol.records import Trained
from staleflow.simulation.trajectory import SimulatedTrajectory

if TYPE_CHECKING:
    from staleflow.simulation.cluster import SimulatedCluster


class Watch:
    """Takes note of nothing: the base of those who do."""

    def begin(self, cluster: SimulatedCluster) -> None:
        """The run begins."""

    def cycled(self) -> None:
        """A coordination cycle is over."""

    def command(self, command: Command) -> None:
        """A command goes out."""

    def joined(self, event: InstanceJoined) -> None:
        """An instance is up."""

    def lost(self, event: InstanceLost) -> None:
        """The coordinator learns that an instance is gone."""

    def reported(self, report: InstanceReport) -> None:
        """A report has come."""

    def drawn(self, groups: Sequence[DrawnGroup]) -> None:
        """Groups were made from prompts."""

    def scoring(self, trajectory_id: str) -> None:
        """A complete trajectory goes to its verifier."""

    def scored(self, trajectory_id: str, raw: float, usable: bool, seconds: float) -> None:
        """Its reward has come; the verifier took so many seconds."""

    def discarded(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Trajectories are dropped."""

    def resampled(self, trajectory_id: str, new_id: str, reason: str) -> None:
        """A straggler is dropped for another one."""

    def truncated(self, trajectory_id: str, reason: str) -> None:
        """A straggler is complete as it is."""

    def gave_up(self, trajectory_id: str, reason: str) -> None:
        """A trajectory failed too often."""

    def batch(self, action: Train, members: Sequence[SimulatedTrajectory], waited_s: float) -> None:
        """A batch, its members in the order of its groups, goes to the trainer, which had waited for it."""

    def trained(self, record: Trained, update_s: float, push_s: float) -> None:
        """A step is trained and its weights are pushed."""

    def pushed(self, version: int) -> None:
        """Weights can be pulled."""

    def finished(self, reason: str) -> None:
        """The coordinator has ended the run."""

    def ended(self) -> None:
        """Nothing is under way any more, and every token is accounted for."""


class StopAfter(Watch):
    """Ends a run when so many steps are done; until then nothing tells it apart from a longer one.

    The step that is in training then is done too, while instances run empty, unless it ends `at_once`.
    """

    def __init__(self, steps: int, *, at_once: bool = False) -> None:
        self._left = steps
        self._at_once = at_once
        self._cluster: SimulatedCluster | None = None

    def begin(self, cluster: SimulatedCluster) -> None:
        """See `Watch`."""
        self._cluster = cluster

    def trained(self, record: Trained, update_s: float, push_s: float) -> None:
        """See `Watch`."""
        self._left -= 1
        if self._left == 0 and self._cluster is not None:
            if self._at_once:
                self._cluster.halt()
            else:
                self._cluster.request_stop()
