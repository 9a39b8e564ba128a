"""How the instances are doing: a sample of each about once a second, kept as rows of kind `instances`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from staleflow.coordination.actions import Pull
from staleflow.coordination.view import ControlView
from staleflow.telemetry.events import BatchTaken, Handlers, RunBegan, StepTrained, TurnEnded
from staleflow.telemetry.row_queue import RowQueue
from staleflow.telemetry.rows import InstanceStatus, Values


class InstanceRates:
    """Tokens per second of each instance over the last sampling interval."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, float]] = {}
        self._rates: dict[str, float] = {}

    def sample(self, view: ControlView, now: float) -> None:
        """Take a sample; rates are those since the one before."""
        for name in view.instances():
            snapshot = view.instance(name)
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
    view: ControlView, rates: InstanceRates, lost: Iterable[str] = ()
) -> tuple[InstanceStatus, ...]:
    """One for each instance that is up, then one for each of the `lost`."""
    statuses: list[InstanceStatus] = []
    for name in sorted(view.instances()):
        snapshot = view.instance(name)
        pulling = any(isinstance(command, Pull) for command in view.outstanding(name))
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
                state="lost",
            )
        )
    return tuple(statuses)


class InstanceRows:
    """A listener."""

    def __init__(
        self,
        rows: RowQueue,
        rates: InstanceRates,
        *,
        now: Callable[[], float],
        sample_s: float,
        double_after: int | None,
        preemptions: Mapping[str, int],
    ) -> None:
        """It samples the `rates`. `now`: the run's clock. `sample_s`: between two rows, which doubles after
        `double_after` rows (None: never). `preemptions`: by instance, kept by another listener.
        """
        self._rows = rows
        self._rates = rates
        self._now = now
        self._sample_s = sample_s
        self._double_after = double_after
        self._preemptions = preemptions
        self._view: ControlView
        self._sampled_at = now()
        self._samples = 0
        self._trainer_busy = False

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {
            RunBegan: self._began,
            BatchTaken: self._batch,
            StepTrained: self._trained,
            TurnEnded: self._turned,
        }

    def _began(self, event: RunBegan) -> None:
        self._view = event.view

    def _batch(self, _: BatchTaken) -> None:
        self._trainer_busy = True

    def _trained(self, _: StepTrained) -> None:
        self._trainer_busy = False

    def _turned(self, _: TurnEnded) -> None:
        now = self._now()
        if now - self._sampled_at < self._sample_s:
            return
        self._sampled_at = now
        self._samples += 1
        if self._double_after is not None and self._samples % self._double_after == 0:
            self._sample_s *= 2
        self._rates.sample(self._view, now)
        values: Values = {"trainer/busy": int(self._trainer_busy)}
        for status in instance_statuses(self._view, self._rates):
            prefix = f"instance/{status.instance}"
            values[f"{prefix}/version"] = status.version
            values[f"{prefix}/running"] = status.running
            values[f"{prefix}/waiting"] = status.waiting
            values[f"{prefix}/kv_usage"] = status.kv_usage
            values[f"{prefix}/tokens_per_s"] = status.tokens_per_s
            values[f"{prefix}/preemptions"] = self._preemptions.get(status.instance, 0)
        self._rows.add("instances", values)
