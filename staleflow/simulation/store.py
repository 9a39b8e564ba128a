"""The simulation's trajectory server: every living simulated trajectory, and the account of its tokens.

Invariants: a trajectory is there from the drawing of its group until it is trained or dropped; one that is
dropped while an instance still holds it stays until it has left, so that no token goes uncounted; a prompt
whose group expired untrained is drawn again before any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from staleflow.coordination.actions import Command
from staleflow.coordination.events import DrawnGroup
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.responses import LateTokens
from staleflow.data.trajectory import Reward
from staleflow.simulation.settings import ClusterSettings
from staleflow.simulation.trajectory import SimulatedTrajectory

TOKEN_FATES = ("trained", "filtered", "failed", "aborted", "expired", "discarded", "lost", "in_flight")
"""What becomes of a generated token."""


class SimulatedScored(NamedTuple):
    """A finished simulated trajectory with its reward."""

    trajectory: SimulatedTrajectory
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBatch:
    """What a simulated trainer gets."""

    step: int
    groups: tuple[tuple[SimulatedScored, ...], ...]


class SimulatedBalance:
    """The account of generated tokens, as far as decoding has come. What an instance took with it when it was
    lost counts as never generated.
    """

    def __init__(self, fates: Counter[str], generated: Callable[[], int]) -> None:
        self._fates = fates
        self._generated = generated

    def as_dict(self) -> dict[str, int]:
        """generated, trained, filtered, aborted, discarded, in_flight: the first is the sum of the others."""
        fates = self._fates
        values = {
            "generated": self._generated() - fates["lost"],
            "trained": fates["trained"],
            "filtered": fates["filtered"],
            "aborted": fates["aborted"],
            "discarded": fates["failed"] + fates["expired"] + fates["discarded"],
        }
        values["in_flight"] = 2 * values["generated"] - sum(values.values())
        return values


class SimulatedStore:
    """A `runtime.backend.TrajectoryStore`. `fates` counts tokens by what became of them."""

    def __init__(
        self, settings: ClusterSettings, fates: Counter[str], generated: Callable[[], int] = lambda: 0
    ) -> None:
        """`generated`: tokens that all instances have generated so far."""
        self._settings = settings
        self._fates = fates
        self.balance = SimulatedBalance(fates, generated)
        self._living: dict[str, SimulatedTrajectory] = {}
        self.leaving: dict[str, str] = {}
        """Dropped ones that an instance still holds, and why."""
        self._late: dict[str, SimulatedTrajectory] = {}
        """Dropped ones of which a report is still to come."""
        self._training: dict[int, int] = {}
        self._drawn = 0
        self._expired: deque[tuple[str, int]] = deque()

    def __len__(self) -> int:
        return len(self._living)

    def find(self, trajectory_id: str) -> SimulatedTrajectory | None:
        """A living trajectory that is still wanted."""
        return None if trajectory_id in self.leaving else self._living.get(trajectory_id)

    def get(self, trajectory_id: str) -> SimulatedTrajectory:
        """The same; KeyError when it is gone."""
        return self._living[trajectory_id]

    def lengths(self, trajectory_ids: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Length of each of these that is alive, in tokens, prompt included."""
        return tuple((t, self._living[t].base) for t in trajectory_ids if t in self._living)

    def payloads(self, commands: Sequence[Command]) -> Mapping[str, SimulatedTrajectory]:
        """Nothing: instances look trajectories up when a Route arrives."""
        return {}

    def draw(self, count: int, *, padding: bool = False) -> tuple[tuple[DrawnGroup, ...], bool]:
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

    # ------------------------------------------------------------------ what becomes of them

    def absorb(self, update: InstanceUpdate) -> Sequence[LateTokens]:
        """Trajectories grow where they are decoded; returns what came for those that are gone."""
        if not self._late:
            return ()
        report, late = update.report, []
        finished = [t.trajectory_id for t in report.finished]
        for trajectory_id in (*finished, *(t.trajectory_id for t in report.interrupted), *report.aborted):
            gone = self._late.pop(trajectory_id, None)
            if gone is not None:
                tokens = gone.base - gone.dropped_at
                late.append(LateTokens(trajectory_id, tokens, trajectory_id in finished))
        return late

    def answer(self, trajectory_id: str, answer: Any) -> SimulatedTrajectory:
        """No environment is simulated."""
        raise NotImplementedError

    def give_up(self, trajectory_id: str) -> None:
        """Mark a trajectory as failed."""
        self._living[trajectory_id].failed = True

    def rewarded(self, trajectory_id: str, reward: Reward) -> str:
        """Keep the reward; returns what stands for the hash of the response ids."""
        trajectory = self._living[trajectory_id]
        trajectory.reward = reward
        return trajectory.hashed()

    def batch(self, step: int, groups: Sequence[tuple[str, Sequence[str]]], final: bool) -> SimulatedBatch:
        """Take consumed groups out, for the trainer."""
        taken = tuple([tuple([self._take(t) for t in members]) for _, members in groups])
        self._training[step] = sum([s.trajectory.response for group in taken for s in group])
        return SimulatedBatch(step=step, groups=taken)

    def _take(self, trajectory_id: str) -> SimulatedScored:
        trajectory = self._living.pop(trajectory_id)
        assert trajectory.reward is not None, trajectory_id
        return SimulatedScored(trajectory, trajectory.reward)

    def trained(self, step: int) -> None:
        """The batch of `step` has been trained on."""
        self._fates["trained"] += self._training.pop(step)

    def close(self) -> None:
        """The run is over: what is left was in flight."""
        self._fates["in_flight"] += sum(t.response for t in self._living.values())
        self._fates["in_flight"] += sum(self._training.values())
        self._living.clear()
        self._training.clear()

    def discard(self, trajectory_ids: Sequence[str], reason: str) -> list[SimulatedTrajectory]:
        """Trajectories are not wanted any more; those of an expired group come in one call."""
        dropped = []
        if reason == "expired":
            prompt, _, attempt = self._living[trajectory_ids[0]].group_id.rpartition("-a")
            self._expired.append((prompt, int(attempt) + 1))
        for trajectory_id in trajectory_ids:
            trajectory = self._living[trajectory_id]
            if trajectory.instance is None:
                self._drop(trajectory, reason)
            else:
                self.leaving[trajectory_id] = reason  # it goes on until its Abort has come
                trajectory.dropped_at = trajectory.reported
                self._late[trajectory_id] = trajectory
            dropped.append(trajectory)
        return dropped

    def left(self, trajectory_ids: Iterable[str]) -> None:
        """No instance holds these any more."""
        for trajectory_id in trajectory_ids:
            reason = self.leaving.pop(trajectory_id, None)
            if reason is not None:
                self._drop(self._living[trajectory_id], reason)

    def lost(self, trajectory_ids: Sequence[str]) -> None:
        """The instance that held these is gone: of those dropped, no report will come."""
        self.left(trajectory_ids)
        for trajectory_id in trajectory_ids:
            self._late.pop(trajectory_id, None)

    def _drop(self, trajectory: SimulatedTrajectory, reason: str) -> None:
        self._fates[reason] += trajectory.response
        del self._living[trajectory.trajectory_id]

    def resample(self, trajectory_id: str, new_id: str) -> SimulatedTrajectory:
        """Another trajectory of the same prompt in the place of an aborted one, which is returned."""
        group_id = self._living[trajectory_id].group_id
        self._add(group_id.rpartition("-a")[0], group_id, [new_id])
        return self.discard([trajectory_id], "aborted")[0]

    def truncate(self, trajectory_id: str) -> SimulatedTrajectory:
        """It is complete as it is, as if its token budget were used up."""
        trajectory = self._living[trajectory_id]
        trajectory.target, trajectory.truncated = trajectory.base, True
        return trajectory
