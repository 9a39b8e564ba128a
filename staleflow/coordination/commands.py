"""What the coordinator orders: Route, Interrupt, Abort, Pull.

Commands to one incarnation of an instance carry consecutive sequence numbers from 1 on and are applied
in that order. A new incarnation voids every command to the old one that was not acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a Route needs of the staleness buffer before it may be sent."""

    kind: Literal["reserve", "lower"]
    version: int
    """V of the new reservation, or the V to which the group's reservation is lowered."""
    spare: bool = False
    """Reserve as a spare (redundant) group."""


class Route(NamedTuple):
    """Start or continue a trajectory on an instance. A named tuple, for a run makes many: quicker to make."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    group_id: str
    min_version: int
    """The instance refuses the trajectory when its loaded version is lower (V_group of the reservation)."""
    admission: Admission | None = None
    """None: the group's reservation already admits the instance's version."""
    length: int = 0
    """Prompt and response tokens so far: what the instance must prefill."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt:
    """Stop a trajectory and return it to the trajectory server with its tokens."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    length: int = 0
    """Its length as last known: what leaves the KV cache. 0 for one that waits inside the instance."""
    target: str = ""
    """The instance that migration expects it to go on at, whose room is kept until it is back."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a trajectory and drop its tokens."""

    instance: str
    incarnation: int
    seq: int
    trajectory_id: str
    length: int = 0
    """Its length as last known: what leaves the KV cache. 0 for one that waits inside the instance."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Load the newest weights from the parameter server."""

    instance: str
    incarnation: int
    seq: int
    version: int
    """The newest version known when ordered. The instance loads the newest there is, at least this one."""
    reason: str = ""


Command = Route | Interrupt | Abort | Pull


def renumbered(command: Command, seq: int) -> Command:
    """The same command under another sequence number."""
    return command._replace(seq=seq) if isinstance(command, Route) else replace(command, seq=seq)
