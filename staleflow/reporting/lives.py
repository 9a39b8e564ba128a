"""A trajectory, a group and a training step as they are told of afterwards. `story` puts them together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

State = Literal["pending", "running", "external", "scoring", "rewarded"]
"""pending: in the trajectory server; external: its environment is awaited; rewarded: until it is trained."""


@dataclass(slots=True, kw_only=True)
class Stay:
    """A while in one state."""

    state: State
    since: float
    until: float | None = None
    """None: to the end of what is known."""
    instance: str = ""


@dataclass(slots=True, kw_only=True)
class Life:
    """One trajectory."""

    trajectory_id: str
    group: GroupLife
    events: list[tuple[float, str]] = field(default_factory=list)
    """(seconds of the attempt, a sentence)."""
    stays: list[Stay] = field(default_factory=list)
    fate: str = ""
    """How it ended; empty while it is alive."""
    route_seq: int = 0
    arrived: bool = False
    ordered_out: int = 0
    """Sequence number of the Interrupt that is on its way to it; 0: none."""

    @property
    def now(self) -> Stay:
        """The state it is in."""
        return self.stays[-1]

    def enter(self, time: float, state: State, instance: str = "") -> None:
        """Change the state."""
        self.leave(time)
        self.stays.append(Stay(state=state, since=time, instance=instance))

    def leave(self, time: float) -> None:
        """The present state ends."""
        if self.stays and self.now.until is None:
            self.now.until = time

    def tell(self, time: float, text: str) -> None:
        """Add an event."""
        self.events.append((time, text))

    def between(self, start: float, end: float) -> list[tuple[Stay, float]]:
        """Stays that overlap with that time, with the seconds of each."""
        cut = [
            (s, min(end, s.until if s.until is not None else end) - max(start, s.since)) for s in self.stays
        ]
        return [(stay, seconds) for stay, seconds in cut if seconds > 0]


@dataclass(slots=True, kw_only=True)
class GroupLife:
    """One group."""

    group_id: str
    attempt: int
    drawn_at: float
    members: dict[str, Life] = field(default_factory=dict)
    version: int | None = None
    reserved_at: float | None = None
    occupied_at: float | None = None
    step: int | None = None
    """The step that consumed it."""

    @property
    def lives(self) -> list[Life]:
        """Its members."""
        return list(self.members.values())

    @property
    def unfinished(self) -> list[Life]:
        """Members that are alive and not scored."""
        return [life for life in self.lives if not life.fate and life.now.state != "rewarded"]

    @property
    def last_rewarded(self) -> Life:
        """The member that was scored last."""
        scored = [life for life in self.lives if life.now.state == "rewarded"]
        return max(scored or self.lives, key=lambda life: life.now.since)


@dataclass(slots=True, kw_only=True)
class StepLife:
    """One training step of one attempt."""

    attempt: int
    step: int
    idle_since: float | None = None
    """When the trainer had the weights that it starts from."""
    batch_at: float | None = None
    trained_at: float | None = None
    update_s: float = 0.0
    push_s: float = 0.0
    released: Counter[str] = field(default_factory=Counter)
    """Groups released while the trainer waited for this step, by reason."""


RELEASED = {
    "filtered": "all rewards of its group were equal, so it would have taught nothing",
    "failed": "no member of its group could be scored",
    "aborted": "a surplus member",
    "expired": "a spare group that nobody needed in time",
    "discarded": "the run was over",
}
"""What the words of the ledger and of the token balance mean."""
