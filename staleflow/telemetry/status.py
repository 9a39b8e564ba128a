"""The picture of this moment for the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from staleflow.coordination.events import InstanceJoined
from staleflow.coordination.view import ControlView
from staleflow.data.responses import Balance
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.telemetry.events import (
    BatchTaken,
    Evaluated,
    Handlers,
    InstanceDown,
    PhaseBegan,
    RunBegan,
    RunEnded,
    StepTrained,
    TurnEnded,
)
from staleflow.telemetry.instance_rows import InstanceRates, instance_statuses
from staleflow.telemetry.rows import BufferStatus, RunStatus
from staleflow.telemetry.step_metrics import reward_mean, staleness

STATUS_EVERY_S = 0.25
"""Time between two pictures; the console draws four times a second."""


class StatusPicture:
    """A listener that replaces `status`, which is immutable, so that any thread may read it."""

    def __init__(
        self,
        status: RunStatus,
        rates: InstanceRates,
        *,
        seconds: Callable[[], float],
        redraw: Callable[[], float],
    ) -> None:
        """`status`: that before the run. `seconds`: since it began. `redraw`: the clock by which pictures
        become due.
        """
        self.status = status
        """The newest picture."""
        self._rates = rates
        self._seconds = seconds
        self._redraw = redraw
        self._drawn_at = redraw()
        self._view: ControlView
        self._balance: Balance
        self._lost: set[str] = set()
        self._trainer_busy = False
        self._reward_mean = 0.0

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            RunBegan: self._began,
            PhaseBegan: self._phase,
            InstanceJoined: self._joined,
            InstanceDown: self._down,
            BatchTaken: self._batch,
            StepTrained: self._trained,
            Evaluated: self._evaluated,
            TurnEnded: self._turned,
            RunEnded: self._ended,
        }

    def _began(self, event: RunBegan) -> None:
        self._view, self._balance = event.view, event.balance

    def _phase(self, event: PhaseBegan) -> None:
        self.status = replace(self.status, phase=event.phase)

    def _joined(self, event: InstanceJoined) -> None:
        self._lost.discard(event.instance)

    def _down(self, event: InstanceDown) -> None:
        self._lost.add(event.instance)

    def _batch(self, event: BatchTaken) -> None:
        self._trainer_busy = True
        self._reward_mean = reward_mean(event.groups)

    def _trained(self, event: StepTrained) -> None:
        self._trainer_busy = False
        lags = staleness(event, self._view.bound)
        self.status = replace(
            self.status,
            staleness_mean=float(lags["staleness/mean"]),
            staleness_max=int(lags["staleness/max"]),
            reward_mean=(*self.status.reward_mean, self._reward_mean),
        )

    def _evaluated(self, event: Evaluated) -> None:
        sampled = next((v for k, v in event.values.items() if k.startswith("heldout/avg@")), None)
        if sampled is not None:
            self.status = replace(self.status, evals=(*self.status.evals, (event.version, sampled)))

    def _turned(self, _: TurnEnded) -> None:
        now = self._redraw()
        if now - self._drawn_at >= STATUS_EVERY_S:
            self._drawn_at = now
            self._draw()

    def _ended(self, _: RunEnded) -> None:
        self.status = replace(self.status, phase="done")
        self._draw()

    def _draw(self) -> None:
        view = self._view
        instances = instance_statuses(view, self._rates, lost=self._lost)
        version = view.newest_version
        self.status = replace(
            self.status,
            step=view.next_buffer,
            version=version,
            seconds=self._seconds(),
            buffers=buffer_statuses(view),
            instances=instances,
            trainer=f"training step {version}" if self._trainer_busy else "idle",
            waiting_for=waiting_for(view),
            pending=view.count(TrajectoryState.PENDING),
            scoring=view.count(TrajectoryState.GENERATED),
            in_flight=view.count(TrajectoryState.RUNNING),
            tokens_per_s=sum(status.tokens_per_s for status in instances),
            tokens=self._balance.as_dict(),
        )


def buffer_statuses(view: ControlView) -> tuple[BufferStatus, ...]:
    """The virtual staleness buffers from the next one on."""
    first, capacity = view.next_buffer, view.batch_size
    return tuple(
        BufferStatus(step=first + offset, capacity=capacity, reserved=reserved, occupied=occupied)
        for offset, (reserved, occupied) in enumerate(view.placement())
    )


def waiting_for(view: ControlView) -> str:
    """Why the trainer has no batch, naming who is waited for; empty while it has one."""
    if not view.trainer_idle or view.finished is not None:
        return ""
    batch = view.batch_size
    occupied = sum(done for _, done in view.by_deadline())
    missing = max(0, batch - occupied)
    if not view.instances():
        return "no rollout instance is up"
    running = view.count(TrajectoryState.RUNNING)
    scoring = view.count(TrajectoryState.GENERATED)
    external = view.count(TrajectoryState.WAITING_EXTERNAL)
    parts = [f"{missing} of {batch} groups of step {view.next_buffer}"]
    if running:
        where = sorted(n for n in view.instances() if view.resident(n))
        shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        parts.append(f"{running} trajectories on {shown}")
    if scoring:
        parts.append(f"{scoring} being scored")
    if external:
        parts.append(f"{external} waiting for their environment")
    if pending := view.count(TrajectoryState.PENDING):
        parts.append(f"{pending} in the trajectory server")
    return "; ".join(parts)
