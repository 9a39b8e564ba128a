"""The trajectory server: the payload of every live trajectory, and the account of every token.

Invariants: a payload exists from the drawing of its group until it is trained or discarded; it grows only by
what an instance or an environment reports; generated = trained + filtered + aborted + discarded + in flight,
at all times; a prompt whose group expired untrained is drawn again before any other, so that each use of a
prompt in an epoch still happens once.

Only `coordination.Control` decides who owns a trajectory and what happens to it; this class follows. It gives
the coordinator only ids, lengths and versions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from staleflow.coordination.actions import Command, Route
from staleflow.coordination.events import DrawnGroup
from staleflow.data.environment import Done, Given, Waiting, after_turn
from staleflow.data.instance_update import InstanceUpdate
from staleflow.data.responses import LateTokens
from staleflow.data.trajectory import (
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    TrainBatch,
    Trajectory,
    token_hash,
)

_GROUP_ID = re.compile(r"e(\d+)-p(\d+)-a(\d+)")

BALANCE_COLUMN = {"filtered": "filtered", "aborted": "aborted"}
"""Column of the token balance by release reason; every other reason is `discarded`."""


class TokenBalance:
    """Generated tokens by outcome."""

    def __init__(self) -> None:
        self.generated = 0
        self.trained = 0
        self.filtered = 0
        self.aborted = 0
        self.discarded = 0

    @property
    def in_flight(self) -> int:
        """Generated and not yet trained or dropped."""
        return self.generated - self.trained - self.filtered - self.aborted - self.discarded

    def drop(self, tokens: int, reason: str) -> None:
        """Account for tokens that will not be trained."""
        column = BALANCE_COLUMN.get(reason, "discarded")
        setattr(self, column, getattr(self, column) + tokens)

    def as_dict(self) -> dict[str, int]:
        """All columns, in_flight included."""
        names = ("generated", "trained", "filtered", "aborted", "discarded", "in_flight")
        return {name: getattr(self, name) for name in names}


class TrajectoryServer:
    """Payload by trajectory id."""

    def __init__(
        self,
        *,
        prompts: Iterator[tuple[int, int, Prompt]],
        padding: Iterator[tuple[int, int, Prompt]],
        members: int,
        max_new_tokens: int,
        attempt: int = 0,
    ) -> None:
        """`prompts` yields (epoch, index, prompt) in drawing order; `padding` continues after the last epoch.

        `members`: trajectories that a group starts with, that is the group size plus redundant ones.
        `attempt` is part of group ids, so that trajectories generated again after a resume have new ids.
        """
        self.balance = TokenBalance()
        self._prompts = prompts
        self._padding = padding
        self._members = members
        self._max_new_tokens = max_new_tokens
        self._attempt = attempt
        self._trajectories: dict[str, Trajectory] = {}
        self._rewards: dict[str, Reward] = {}
        self._training: dict[int, int] = {}
        self._expired: deque[tuple[str, Prompt]] = deque()
        """(id of its next group, prompt) of prompts whose last group expired, oldest first."""

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._trajectories

    def draw(self, count: int, *, padding: bool = False) -> tuple[tuple[DrawnGroup, ...], bool]:
        """Create up to `count` groups. The flag is True if the source is exhausted."""
        groups: list[DrawnGroup] = []
        while self._expired and len(groups) < count:
            groups.append(self._create(*self._expired.popleft(), redrawn=True))
        source = self._padding if padding else self._prompts
        while len(groups) < count:
            drawn = next(source, None)
            if drawn is None:
                return tuple(groups), True
            epoch, index, prompt = drawn
            groups.append(self._create(f"e{epoch}-p{index}-a{self._attempt}", prompt))
        return tuple(groups), False

    def _create(self, group_id: str, prompt: Prompt, *, redrawn: bool = False) -> DrawnGroup:
        members = tuple(f"{group_id}-m{member}" for member in range(self._members))
        for member, trajectory_id in enumerate(members):
            self._trajectories[trajectory_id] = Trajectory(
                trajectory_id=trajectory_id,
                group_id=group_id,
                member=member,
                prompt=prompt,
                max_new_tokens=self._max_new_tokens,
            )
        return DrawnGroup(
            group_id=group_id, members=members, prompt_length=len(prompt.tokens), redrawn=redrawn
        )

    def get(self, trajectory_id: str) -> Trajectory:
        """Payload of a live trajectory. Raises KeyError if it is gone."""
        return self._trajectories[trajectory_id]

    def find(self, trajectory_id: str) -> Trajectory | None:
        """Payload of a trajectory; None if it is gone."""
        return self._trajectories.get(trajectory_id)

    def payloads(self, commands: Iterable[Command]) -> dict[str, Trajectory]:
        """Payloads of the Routes' trajectories, as far as they are alive."""
        return {
            c.trajectory_id: self._trajectories[c.trajectory_id]
            for c in commands
            if isinstance(c, Route) and c.trajectory_id in self._trajectories
        }

    def lengths(self, trajectory_ids: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Lengths of these trajectories, as far as they are alive, in tokens, prompt included."""
        return tuple((t, self._trajectories[t].length) for t in trajectory_ids if t in self._trajectories)

    def absorb(self, update: InstanceUpdate) -> list[LateTokens]:
        """Add an instance's new tokens. Returns those of released trajectories, counted as aborted."""
        late: list[LateTokens] = []
        for delta in update.deltas:
            tokens = len(delta.segment.tokens)
            self.balance.generated += tokens
            known = self._trajectories.get(delta.trajectory_id)
            if known is None:
                self.balance.drop(tokens, "aborted")
                late.append(LateTokens(delta.trajectory_id, tokens, delta.finish_reason is not None))
                continue
            self._trajectories[known.trajectory_id] = known.extended(delta.segment).finished(
                delta.finish_reason
            )
        return late

    def answer(self, trajectory_id: str, answer: Given | Waiting | Done) -> Trajectory:
        """Apply the environment's answer; returns the changed trajectory."""
        changed = after_turn(self._trajectories[trajectory_id], answer)
        self._trajectories[trajectory_id] = changed
        return changed

    def give_up(self, trajectory_id: str) -> None:
        """Mark a trajectory as failed."""
        self._trajectories[trajectory_id] = self._trajectories[trajectory_id].finished(FinishReason.FAILED)

    def truncate(self, trajectory_id: str) -> Trajectory:
        """Finish a trajectory as if its token budget were used up; returns it."""
        cut = self._trajectories[trajectory_id].finished(FinishReason.LENGTH)
        self._trajectories[trajectory_id] = cut
        return cut

    def resample(self, trajectory_id: str, new_id: str) -> Trajectory:
        """Replace an aborted trajectory by a new one of the same prompt; returns the old payload."""
        (dropped,) = self.discard([trajectory_id], "aborted")
        self._trajectories[new_id] = replace(dropped, trajectory_id=new_id, segments=(), finish_reason=None)
        return dropped

    def rewarded(self, trajectory_id: str, reward: Reward) -> str:
        """Store the verifier's answer; returns the hash of the response ids."""
        self._rewards[trajectory_id] = reward
        return token_hash(self._trajectories[trajectory_id].tokens)

    def batch(self, step: int, groups: Sequence[tuple[str, Sequence[str]]], final: bool) -> TrainBatch:
        """Remove and return the payload of consumed groups, for the trainer."""
        taken = tuple(tuple(self._take(t) for t in members) for _, members in groups)
        self._training[step] = sum(generated_tokens(s.trajectory) for group in taken for s in group)
        return TrainBatch(step=step, groups=taken, final=final)

    def trained(self, step: int) -> None:
        """Count the batch of `step` as trained."""
        self.balance.trained += self._training.pop(step)

    def discard(self, trajectory_ids: Sequence[str], reason: str) -> list[Trajectory]:
        """Drop released trajectories; returns their payload.

        With reason `expired`, their prompts are drawn again; one call must contain all members of a group.
        """
        dropped: list[Trajectory] = []
        for trajectory_id in trajectory_ids:
            trajectory = self._trajectories.pop(trajectory_id)
            self._rewards.pop(trajectory_id, None)
            self.balance.drop(generated_tokens(trajectory), reason)
            dropped.append(trajectory)
        if reason == "expired":
            for group_id, prompt in {t.group_id: t.prompt for t in dropped}.items():
                self._expired.append((_next_group_id(group_id), prompt))
        return dropped

    def _take(self, trajectory_id: str) -> ScoredTrajectory:
        return ScoredTrajectory(
            trajectory=self._trajectories.pop(trajectory_id), reward=self._rewards.pop(trajectory_id)
        )


def _next_group_id(group_id: str) -> str:
    """Id for the same use of the same prompt, with the next attempt number."""
    match = _GROUP_ID.fullmatch(group_id)
    assert match is not None, group_id
    epoch, index, attempt = match.groups()
    return f"e{epoch}-p{index}-a{int(attempt) + 1}"


def generated_tokens(trajectory: Trajectory) -> int:
    """Tokens generated by the model, without given ones."""
    return sum(len(s.tokens) for s in trajectory.segments if s.generated)
