"""The picture of this moment for the console, and the once-a-second sample of the instances."""

from __future__ import annotations

from staleflow.coordination.actions import Pull
from staleflow.coordination.control import Control
from staleflow.protocol.lifecycle import TrajectoryState
from staleflow.telemetry.rows import BufferStatus, InstanceStatus


class InstanceRates:
    """Tokens per second of each instance over the last sampling interval."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, float]] = {}
        self._rates: dict[str, float] = {}

    def sample(self, control: Control, now: float) -> None:
        """Take a sample; rates are those since the one before."""
        for name in control.view.instances():
            snapshot = control.view.instance(name)
            incarnation, tokens, then = self._last.get(name, (snapshot.incarnation, 0, now))
            if incarnation != snapshot.incarnation:
                tokens, then = 0, now
            if now > then:
                self._rates[name] = max(0.0, (snapshot.generated_tokens - tokens) / (now - then))
            self._last[name] = (snapshot.incarnation, snapshot.generated_tokens, now)

    def rate(self, instance: str) -> float:
        """Tokens per second."""
        return self._rates.get(instance, 0.0)


def instance_statuses(
    control: Control, rates: InstanceRates, lost: dict[str, str]
) -> tuple[InstanceStatus, ...]:
    """One line per instance, those that are down last."""
    statuses: list[InstanceStatus] = []
    for name in sorted(control.view.instances()):
        snapshot = control.view.instance(name)
        pulling = any(isinstance(command, Pull) for command in control.view.outstanding(name))
        state = "pulling" if pulling else ("decoding" if snapshot.running else "idle")
        statuses.append(
            InstanceStatus(
                instance=name,
                version=snapshot.version,
                running=snapshot.running,
                waiting=snapshot.waiting,
                kv_usage=snapshot.kv_tokens / max(1, snapshot.kv_capacity),
                tokens_per_s=rates.rate(name),
                state=state,
            )
        )
    for name in sorted(lost):
        statuses.append(
            InstanceStatus(
                instance=name,
                version=-1,
                running=0,
                waiting=0,
                kv_usage=0.0,
                tokens_per_s=0.0,
                state=lost[name],
            )
        )
    return tuple(statuses)


def buffer_statuses(control: Control) -> tuple[BufferStatus, ...]:
    """The virtual staleness buffers from the next one on."""
    first, capacity = control.view.next_buffer, control.view.batch_size
    return tuple(
        BufferStatus(step=first + offset, capacity=capacity, reserved=reserved, occupied=occupied)
        for offset, (reserved, occupied) in enumerate(control.view.placement())
    )


def waiting_for(control: Control) -> str:
    """Why the trainer has no batch, naming who is waited for; empty while it has one."""
    if not control.view.trainer_idle or control.view.finished is not None:
        return ""
    view, batch = control.view, control.view.batch_size
    occupied = sum(done for _, done in control.view.by_deadline())
    missing = max(0, batch - occupied)
    if not control.view.instances():
        return "no rollout instance is up"
    running = view.count(TrajectoryState.RUNNING)
    scoring = view.count(TrajectoryState.GENERATED)
    external = view.count(TrajectoryState.WAITING_EXTERNAL)
    parts = [f"{missing} of {batch} groups of step {control.view.next_buffer}"]
    if running:
        where = sorted(n for n in control.view.instances() if control.view.resident(n))
        shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        parts.append(f"{running} trajectories on {shown}")
    if scoring:
        parts.append(f"{scoring} being scored")
    if external:
        parts.append(f"{external} waiting for their environment")
    if pending := view.count(TrajectoryState.PENDING):
        parts.append(f"{pending} in the trajectory server")
    return "; ".join(parts)
