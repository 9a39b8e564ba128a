"""The picture of this moment for the console, and the once-a-second sample of the instances."""

from __future__ import annotations

from staleflow.coordination.commands import Pull
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
        for name in control.fleet.names():
            snapshot = control.fleet.snapshot(name)
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
    for name in sorted(control.fleet.names()):
        view = control.fleet.views()[name]
        snapshot = view.snapshot
        pulling = any(isinstance(command, Pull) for command in view.outstanding)
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
    first, capacity = control.buffer.next_buffer, control.buffer.batch_size
    return tuple(
        BufferStatus(step=first + offset, capacity=capacity, reserved=reserved, occupied=occupied)
        for offset, (reserved, occupied) in enumerate(control.buffer.placement())
    )


def waiting_for(control: Control) -> str:
    """Why the trainer has no batch, naming who is waited for; empty while it has one."""
    if not control.batches.trainer_idle or control.finished is not None:
        return ""
    population, batch = control.population, control.buffer.batch_size
    occupied = sum(done for _, done in control.buffer.by_deadline())
    missing = max(0, batch - occupied)
    if not control.fleet.names():
        return "no rollout instance is up"
    running = population.count(TrajectoryState.RUNNING)
    scoring = population.count(TrajectoryState.GENERATED)
    external = population.count(TrajectoryState.WAITING_EXTERNAL)
    parts = [f"{missing} of {batch} groups of step {control.buffer.next_buffer}"]
    if running:
        where = sorted(n for n in control.fleet.names() if control.fleet.resident(n))
        shown = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
        parts.append(f"{running} trajectories on {shown}")
    if scoring:
        parts.append(f"{scoring} being scored")
    if external:
        parts.append(f"{external} waiting for their environment")
    if len(population.pending):
        parts.append(f"{len(population.pending)} in the trajectory server")
    return "; ".join(parts)
