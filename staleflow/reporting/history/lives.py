"""What happened to a trajectory, to a group and in a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from staleflow.reporting.history.moves import State


@dataclass(slots=True, kw_only=True)
class Stay:
    """A period in one state."""

    state: State
    since: float
    until: float | None = None
    """None: to the end of what is known."""
    instance: str = ""


@dataclass(slots=True, kw_only=True)
class TrajectoryHistory:
    """One trajectory."""

    trajectory_id: str
    group: GroupHistory
    events: list[tuple[float, str]] = field(default_factory=list)
    """(seconds of the attempt, a sentence)."""
    stays: list[Stay] = field(default_factory=list)
    fate: str = ""
    """How it ended; empty while it is alive."""
    routed: bool = False
    """It was sent to an instance at least once."""
    arrived: bool = False
    """The instance that it was last sent to has acknowledged it."""

    @property
    def now(self) -> Stay:
        """Its present or last state."""
        return self.stays[-1]

    def enter(self, time: float, state: State, instance: str = "") -> None:
        """Change the state."""
        self.leave(time)
        self.stays.append(Stay(state=state, since=time, instance=instance))

    def leave(self, time: float) -> None:
        """The present state ends."""
        if self.stays and self.now.until is None:
            self.now.until = time

    def add(self, time: float, text: str) -> None:
        """Add an event."""
        self.events.append((time, text))

    def between(self, start: float, end: float) -> list[tuple[Stay, float]]:
        """Stays that overlap with that time, with the seconds of each."""
        cut = [
            (s, min(end, s.until if s.until is not None else end) - max(start, s.since)) for s in self.stays
        ]
        return [(stay, seconds) for stay, seconds in cut if seconds > 0]


@dataclass(slots=True, kw_only=True)
class GroupHistory:
    """One group."""

    group_id: str
    attempt: int
    drawn_at: float
    members: dict[str, TrajectoryHistory] = field(default_factory=dict)
    version: int | None = None
    reserved_at: float | None = None
    occupied_at: float | None = None
    step: int | None = None
    """The step that consumed it."""

    @property
    def trajectories(self) -> list[TrajectoryHistory]:
        """Its members."""
        return list(self.members.values())

    @property
    def unfinished(self) -> list[TrajectoryHistory]:
        """Members that are alive and not scored."""
        return [m for m in self.trajectories if not m.fate and m.now.state != "rewarded"]

    @property
    def last_rewarded(self) -> TrajectoryHistory:
        """The member that was scored last."""
        scored = [m for m in self.trajectories if m.now.state == "rewarded"]
        return max(scored or self.trajectories, key=lambda m: m.now.since)

    @property
    def completed_at(self) -> float:
        """When its last reward came; if it is not complete, when it was drawn."""
        return self.occupied_at if self.occupied_at is not None else self.drawn_at


@dataclass(slots=True, kw_only=True)
class StepHistory:
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
