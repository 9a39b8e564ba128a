"""The `Control` of a random cluster: after every event and cycle, its state is what the protocol allows."""

from __future__ import annotations

from collections.abc import Callable

from cluster_settings import ClusterSettings
from cluster_watch import Violation
from watched_coordinator import WatchedCoordinator

from staleflow.coordination.actions import Action, Send
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.events import Event
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.servers.trajectory_server import TrajectoryServer
from staleflow.training.filtering import is_uninformative


class WatchedControl(Control):
    """`server` holds the payload; `tell` takes a line for each event and action, for one who reads a seed."""

    def __init__(
        self,
        settings: ClusterSettings,
        coordinator: WatchedCoordinator,
        server: TrajectoryServer,
        *,
        tell: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._watched = coordinator
        self._server = server
        self._tell = tell
        super().__init__(
            buffer=StalenessBuffer(
                bound=settings.kept_bound, batch_size=settings.batch_size, spare_limit=settings.spare_groups
            ),
            coordinator=coordinator,
            batches=BatchSettings(
                steps=settings.steps, group_size=settings.group_size, last_batch=settings.last_batch
            ),
            patience=Patience(stall_after_s=settings.stall_after_s),
            stragglers=settings.stragglers,
            expected_response=max(1, settings.max_new_tokens // 4),
            group_filter=is_uninformative if settings.is_filtered else None,
            costs=OnlineCosts(settings.known_costs or START_VALUES, refine=settings.refine_costs),
        )

    def handle(self, event: Event) -> list[Action]:
        """As `Control`, with everything that it ordered before carried out."""
        self._check_payload()
        actions = super().handle(event)
        self._check(event, actions)
        return actions

    def cycle(self, now: float) -> list[Action]:
        """As `Control`; every command that its coordinator decided on leaves."""
        self._check_payload()
        actions = super().cycle(now)
        if self.view.finished is None and self._watched.is_policy:
            sent = [e.command for e in actions if isinstance(e, Send)]
            lacking = [c for c in self._watched.decision.commands if c not in sent]
            if lacking:
                self._fail(f"at {now:.3f} s: not carried out: {lacking}")
        self._check(f"cycle at {now:.4f} s", actions)
        return actions

    @property
    def living(self) -> set[str]:
        """Trajectories that it knows."""
        return {member.trajectory_id for member in self._trajectories.members()}

    def describe(self) -> str:
        """What lives, for a message."""
        living = [
            (m.trajectory_id, m.state.value, m.instance, m.length) for m in self._trajectories.members()
        ]
        return f"{living}, buffer {self.view.placement()} from {self.view.next_buffer}"

    # ------------------------------------------------------------------ what must hold

    def _fail(self, message: str) -> None:
        raise Violation(f"seed {self._settings.seed}: {message}")

    def _check_payload(self) -> None:
        """Everything that lives has its payload."""
        lacking = self.living - self._server._trajectories.keys()
        if lacking:
            self._fail(f"no payload of {lacking}")

    def _check(self, what: object, actions: list[Action]) -> None:
        if self._tell is not None:
            self._tell(f"{what}" + "".join(f"\n    {action}" for action in actions))
        self._check_places()
        self._check_buffer()

    def _check_places(self) -> None:
        """A trajectory is on one instance exactly while it runs, and pending exactly while it waits."""
        placed: dict[str, str] = {}
        for name in self.view.instances():
            for trajectory_id in self.view.resident(name):
                if trajectory_id in placed:
                    self._fail(f"{trajectory_id} is on {placed[trajectory_id]} and on {name}")
                placed[trajectory_id] = name
        for member in self._trajectories.members():
            name, state = member.trajectory_id, member.state
            if (state is TrajectoryState.RUNNING) != (name in placed):
                self._fail(f"{name} is {state} and on {placed.get(name)}")
            if (state is TrajectoryState.PENDING) != (name in self._trajectories.pending):
                self._fail(f"{name} is {state}, and listed as pending or not")

    def _check_buffer(self) -> None:
        """Reserved groups are in the buffer, within the bound, and no more than it may hold."""
        bound, view = self._settings.kept_bound, self.view
        for group in self._trajectories.groups():
            if (group.version is not None) != (group.group_id in self._buffer):
                self._fail(f"{group.group_id} is reserved at {group.version}, in the buffer or not")
            if group.version is not None and group.version + bound < view.next_buffer:
                self._fail(f"{group.group_id}, reserved at {group.version}, fell behind {view.next_buffer}")
        if view.firm_count + view.spare_count != len(self._buffer):
            self._fail(f"{view.firm_count} firm and {view.spare_count} spare of {len(self._buffer)} groups")
        if view.firm_count > (bound + 1) * self._settings.batch_size:
            self._fail(f"{view.firm_count} firm groups")
        if view.spare_count > self._settings.spare_groups:
            self._fail(f"{view.spare_count} spare groups")
