"""The simulation's trajectory server: every living simulated trajectory, and the account of its tokens.

Invariants: a trajectory is there from the drawing of its group until it is trained or dropped; one that is
dropped while an instance still holds it stays until it has left, so that no token goes uncounted; a prompt
whose group expired untrained is drawn again before any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from staleflow.coordination.events import DrawnGroup
from staleflow.simulation.settings import ClusterSettings
from staleflow.simulation.trajectory import SimulatedTrajectory


class TrajectoryStore:
    """`fates` counts tokens by what became of them."""

    def __init__(self, settings: ClusterSettings, fates: Counter[str]) -> None:
        self._settings = settings
        self._fates = fates
        self._living: dict[str, SimulatedTrajectory] = {}
        self.leaving: dict[str, str] = {}
        """Dropped ones that an instance still holds, and why."""
        self._drawn = 0
        self._expired: deque[tuple[str, int]] = deque()

    def find(self, trajectory_id: str) -> SimulatedTrajectory | None:
        """A living trajectory that is still wanted."""
        return None if trajectory_id in self.leaving else self._living.get(trajectory_id)

    def living(self) -> Iterable[SimulatedTrajectory]:
        """All of them, in order of drawing."""
        return self._living.values()

    def draw(self, count: int, *, padding: bool) -> tuple[tuple[DrawnGroup, ...], bool]:
        """Create up to `count` groups; the flag says that the source is exhausted."""
        groups: list[DrawnGroup] = []
        while self._expired and len(groups) < count:
            prompt, attempt = self._expired.popleft()
            groups.append(self._create(prompt, attempt))
        while len(groups) < count:
            if not padding and self._drawn == self._settings.prompts:
                return tuple(groups), True
            groups.append(self._create(f"e{int(padding)}-p{self._drawn}", 0))
            self._drawn += 1
        return tuple(groups), False

    def _create(self, prompt: str, attempt: int) -> DrawnGroup:
        settings, group_id = self._settings, f"{prompt}-a{attempt}"
        members = tuple([f"{group_id}-m{m}" for m in range(settings.group_size + settings.surplus)])
        self._add(prompt, group_id, members)
        return DrawnGroup(
            group_id=group_id,
            members=members,
            prompt_length=settings.prompt_length,
            redrawn=attempt > 0,
        )

    def _add(self, prompt: str, group_id: str, members: Sequence[str]) -> None:
        settings = self._settings
        most, length = settings.max_new_tokens, settings.prompt_length
        for member, tokens in zip(members, settings.lengths(prompt, members), strict=True):
            self._living[member] = SimulatedTrajectory(
                member,
                group_id,
                prompt=length,
                target=length + max(1, min(tokens, most)),
                truncated=tokens >= most,
            )

    def take(self, trajectory_ids: Iterable[str]) -> list[SimulatedTrajectory]:
        """Trajectories go to the trainer."""
        return [self._living.pop(t) for t in trajectory_ids]

    def discard(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Trajectories are not wanted any more; those of an expired group come in one call."""
        if reason == "expired":
            prompt, _, attempt = self._living[trajectory_ids[0]].group_id.rpartition("-a")
            self._expired.append((prompt, int(attempt) + 1))
        for trajectory_id in trajectory_ids:
            trajectory = self._living[trajectory_id]
            if trajectory.instance is None:
                self._drop(trajectory, reason)
            else:
                self.leaving[trajectory_id] = reason  # it goes on until its Abort has come

    def left(self, trajectory_ids: Iterable[str]) -> None:
        """These are on no instance any more."""
        for trajectory_id in trajectory_ids:
            reason = self.leaving.pop(trajectory_id, None)
            if reason is not None:
                self._drop(self._living[trajectory_id], reason)

    def _drop(self, trajectory: SimulatedTrajectory, reason: str) -> None:
        self._fates[reason] += trajectory.response
        del self._living[trajectory.trajectory_id]

    def resample(self, trajectory_id: str, new_id: str) -> None:
        """Another trajectory of the same prompt in the place of an aborted one."""
        group_id = self._living[trajectory_id].group_id
        self._add(group_id.rpartition("-a")[0], group_id, [new_id])
        self.discard([trajectory_id], "aborted")

    def truncate(self, trajectory_id: str) -> None:
        """It is complete as it is, as if its token budget were used up."""
        trajectory = self._living[trajectory_id]
        trajectory.target, trajectory.truncated = trajectory.base, True
