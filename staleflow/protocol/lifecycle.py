"""The states of a trajectory, and a table of the legal transitions.

Invariant: a trajectory is in exactly one state, and on an instance only while it is RUNNING. A transition
missing from the table raises ProtocolError and changes nothing.

::

    PENDING ──route──> RUNNING ──finished──> GENERATED ──scored──> REWARDED ──consume──> CONSUMED
       ^                  │                     │  ^
       ├──interrupted─────┘                     │  │ time limit passed
       │  rejected, lost                        v  │
       └────────given───────────────────  WAITING_EXTERNAL

    and from every state but CONSUMED: ──release──> RELEASED

PENDING to GENERATED: a trajectory that failed too often (it is masked), or one that is cut as a straggler.
"""

from __future__ import annotations

from enum import StrEnum

from staleflow.errors import ProtocolError


class TrajectoryState(StrEnum):
    """State of a trajectory."""

    PENDING = "pending"
    """In the trajectory server: initial, or interrupted with its tokens kept."""
    RUNNING = "running"
    """Ordered to an instance."""
    WAITING_EXTERNAL = "waiting_external"
    """Waiting for its environment (a tool, the next turn); keeps its reservation."""
    GENERATED = "generated"
    """Complete but not scored."""
    REWARDED = "rewarded"
    """Scored; its group waits in the buffer."""
    CONSUMED = "consumed"
    """Handed to the trainer."""
    RELEASED = "released"
    """Filtered, aborted, surplus or discarded."""

    __hash__ = str.__hash__  # Enum.__hash__ is a Python function; each transition hashes


_P, _R, _W, _G, _S, _C, _X = TrajectoryState
TRANSITIONS: dict[TrajectoryState, frozenset[TrajectoryState]] = {
    _P: frozenset({_R, _G, _X}),
    _R: frozenset({_P, _G, _X}),
    _W: frozenset({_P, _G, _X}),
    _G: frozenset({_P, _W, _S, _X}),
    _S: frozenset({_C, _X}),
    _C: frozenset(),
    _X: frozenset(),
}


def check_transition(trajectory_id: str, state: TrajectoryState, to: TrajectoryState) -> None:
    """Raise ProtocolError if the table does not allow `state` to become `to`."""
    if to not in TRANSITIONS[state]:
        raise ProtocolError(f"trajectory {trajectory_id} is {state} and cannot become {to}")
