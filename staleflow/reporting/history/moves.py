"""The journal's lines as moves of trajectories between states: the one place that interprets them.

Invariants: a trajectory is on an instance exactly from its Route to the line that ends its stay there; a line
about an instance that the trajectory has left, or about an earlier Route, moves nothing. Only trajectories on
an instance are kept.

============ ===================================== ==============================================
line         the trajectory becomes                when
============ ===================================== ==============================================
draw         pending                               always
route        running                               always
reject       pending                               it is there by that Route
back, done   pending, scoring                      it is there
report       pending                               its Interrupt is acknowledged, and it is still there
lost         pending                               it is there
external     external                              always
given        pending                               always
gave_up, cut scoring                               always
score        rewarded                              always
abort        off its instance, in no state         always; `cut`, `release` or `resample` follows
release      gone                                  always
resample     gone; the one in its place is pending always
begin        gone: its attempt is over             it is on an instance
============ ===================================== ==============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from staleflow.errors import RunFolderError
from staleflow.storage.journal import Line, read_journal

State = Literal["pending", "running", "external", "scoring", "rewarded"]
"""pending: in the trajectory server; external: its environment is awaited; rewarded: until it is trained."""

_ALWAYS: dict[str, tuple[State, str]] = {
    "external": ("external", "external"),
    "given": ("pending", "given"),
    "gave_up": ("scoring", "given up"),
    "cut": ("scoring", "truncated"),
    "score": ("rewarded", "scored"),
}
"""State and reason, by the kind of a line about one trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One trajectory changes its state, its instance or both."""

    trajectory_id: str
    state: State | None
    """None: none until a later line, or gone for good."""
    instance: str = ""
    """Where it runs from now on; empty: on none."""
    left: str = ""
    """The instance that it leaves; empty: it was on none."""
    why: str
    """`lost`, `refused`, `interrupted`, ..., or the reason why generation finished."""


@dataclass(slots=True)
class _Place:
    """Where a trajectory is."""

    instance: str
    seq: int
    """Sequence number of its Route."""


class Moves:
    """Turns lines, taken in order, into moves."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._by_instance: dict[str, dict[str, None]] = {}
        self._interrupts: dict[str, dict[str, int]] = {}
        """By instance: trajectories with an Interrupt on its way, and its sequence number."""

    def instance_of(self, trajectory_id: str) -> str:
        """Where it is; empty: on none."""
        place = self._places.get(trajectory_id)
        return place.instance if place is not None else ""

    def route_of(self, trajectory_id: str) -> int:
        """Sequence number of the Route by which it is where it is; 0: it is on no instance."""
        place = self._places.get(trajectory_id)
        return place.seq if place is not None else 0

    def take(self, line: Line) -> list[Move]:
        """The moves of one line."""
        match line["k"]:
            case "route":
                return [self._route(line)]
            case "back":
                return self._if_there(line, "pending", "interrupted")
            case "done":
                return self._if_there(line, "scoring", line.get("end", ""))
            case "reject":
                if self.route_of(line.get("id", "")) == line["q"]:
                    return self._if_there(line, "pending", "refused")
            case "interrupt":
                if self.instance_of(line["id"]) == line["i"]:
                    self._interrupts.setdefault(line["i"], {})[line["id"]] = line["q"]
            case "report":
                on_the_way = self._interrupts.get(line["i"], {})
                missing = [i for i, seq in on_the_way.items() if seq <= line["q"]]
                return [self._move(i, "pending", "not there") for i in missing]
            case "lost":
                return [self._move(i, "pending", "lost") for i in list(self._by_instance.get(line["i"], {}))]
            case "draw":
                return [self._move(member, "pending", "drawn") for member in line["m"]]
            case "abort":
                return [self._move(line["id"], None, "aborted")]
            case "release":
                return [self._move(i, None, "released") for i in line["ids"]]
            case "resample":
                return [
                    self._move(line["id"], None, "resampled"),
                    self._move(line["to"], "pending", "drawn"),
                ]
            case "begin":
                return self.end()
            case kind if kind in _ALWAYS:
                state, why = _ALWAYS[kind]
                return [self._move(line["id"], state, why)]
        return []

    def end(self) -> list[Move]:
        """The attempt is over: the moves of all that are still on an instance."""
        return [self._move(trajectory_id, None, "the end") for trajectory_id in list(self._places)]

    def _route(self, line: Line) -> Move:
        trajectory_id, instance = line["id"], line["i"]
        left = self._leave(trajectory_id)
        self._places[trajectory_id] = _Place(instance, line["q"])
        self._by_instance.setdefault(instance, {})[trajectory_id] = None
        return Move(trajectory_id=trajectory_id, state="running", instance=instance, left=left, why="routed")

    def _if_there(self, line: Line, state: State, why: str) -> list[Move]:
        if self.instance_of(line["id"]) != line["i"]:
            return []
        return [self._move(line["id"], state, why)]

    def _move(self, trajectory_id: str, state: State | None, why: str) -> Move:
        return Move(trajectory_id=trajectory_id, state=state, left=self._leave(trajectory_id), why=why)

    def _leave(self, trajectory_id: str) -> str:
        """Take it off its instance, and return that instance."""
        place = self._places.pop(trajectory_id, None)
        if place is None:
            return ""
        del self._by_instance[place.instance][trajectory_id]
        self._interrupts.get(place.instance, {}).pop(trajectory_id, None)
        return place.instance


def journal_lines(folder: Path) -> Iterator[Line]:
    """Lines of a run's journal. Raises RunFolderError when it has none."""
    path = folder / "journal.jsonl"
    if not folder.is_dir():
        raise RunFolderError(f"there is no run folder {folder}")
    if not path.is_file():
        raise RunFolderError(
            f"{folder} has no journal.jsonl; a run writes one unless telemetry.journal is false"
        )
    return read_journal(path)
