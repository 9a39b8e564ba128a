"""Events of a run, made by hand, and what a listener needs to hear them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from staleflow.coordination.events import InstanceReport
from staleflow.data.responses import LateTokens
from staleflow.data.trajectory import FinishReason, Reward
from staleflow.telemetry.events import BatchTaken, EventStream, Listener, ReportReceived

VersionRuns = Sequence[tuple[int, int]]


class Time:
    """Set by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Answer(NamedTuple):
    """A `data.responses.Response`."""

    trajectory_id: str
    prompt_len: int
    response_len: int
    version_runs: VersionRuns
    finish_reason: FinishReason | None
    min_version: int | None
    max_version: int | None


class ScoredAnswer(NamedTuple):
    """A `data.responses.Scored`."""

    trajectory: Answer
    reward: Reward


def response(
    tokens: int = 1,
    *,
    id_: str = "t",
    prompt: int = 3,
    reason: FinishReason | None = FinishReason.STOP,
    runs: VersionRuns | None = None,
) -> Answer:
    """`runs` None: all of version 0."""
    runs = (((0, tokens),) if tokens else ()) if runs is None else runs
    versions = [version for version, _ in runs if version >= 0]
    return Answer(
        trajectory_id=id_,
        prompt_len=prompt,
        response_len=tokens,
        version_runs=runs,
        finish_reason=reason,
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
    )


def scored(trajectory: Answer, raw: float = 1.0, *, usable: bool = True) -> ScoredAnswer:
    return ScoredAnswer(trajectory, Reward(raw=raw, usable=usable, status="ok" if usable else "error"))


def batch(*groups: Sequence[ScoredAnswer], step: int = 0, waited_s: float = 0.0) -> BatchTaken:
    return BatchTaken(step=step, groups=groups, waited_s=waited_s)


def report(instance: str = "i0", **changes: Any) -> InstanceReport:
    values: dict[str, Any] = {"incarnation": 1, "revision": 1, "version": 0, "acked_seq": 0, **changes}
    return InstanceReport(instance=instance, **values)


def received(
    what: InstanceReport,
    *,
    late: Sequence[LateTokens] = (),
    runs: Mapping[str, VersionRuns] | None = None,
) -> ReportReceived:
    """`runs`: the trajectories that are alive."""
    runs = runs or {}
    find = {id_: response(id_=id_, runs=theirs) for id_, theirs in runs.items()}.get
    return ReportReceived(what, late, find)


def teller(*listeners: Listener) -> Callable[[Any], None]:
    """Tells events to the listeners."""
    return EventStream(listeners).tell
