"""A run on simulated machines: the loop on a virtual clock, from plain values or from a config."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from staleflow.config.schema import Config
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.estimates import OnlineCosts
from staleflow.protocol.records import Record
from staleflow.runtime.assembly.control import build_control, build_costs, opening_record
from staleflow.runtime.assembly.loop import build_journal, build_monitor
from staleflow.runtime.backend import Ledger
from staleflow.runtime.backends.simulated import SimulatedBackend
from staleflow.runtime.loop import RunLoop
from staleflow.runtime.loop_settings import LoopSettings
from staleflow.runtime.session import ThreadSession
from staleflow.runtime.start import RunPaths, StartPoint, first_start
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.settings import ClusterSettings, always_right
from staleflow.simulation.store import SimulatedBatch
from staleflow.simulation.trajectory import SimulatedTrajectory
from staleflow.storage.ledger import LedgerWriter
from staleflow.telemetry.events import EventStream, Handlers, Listener, StepTrained
from staleflow.telemetry.monitor import Intervals
from staleflow.telemetry.utilization import LOOK_EVERY_S

INSTANCES_PER_LOOK_S = 250.0
"""Sampling this many instances per simulated second is cheap beside what they do in it."""
SAMPLES_BEFORE_DOUBLING = 200
SimulatedLoop = RunLoop[SimulatedTrajectory, SimulatedBatch]


class NoLedger:
    """Keeps no record."""

    def append(self, record: Record, seq: int, attempt: int) -> None:
        """Forgotten."""

    def flush(self, *, sync: bool = False) -> None:
        """Nothing to flush."""

    def close(self) -> None:
        """Nothing to close."""


class StopAfter:
    """Ends a run when so many steps are done; until then nothing tells it apart from a longer one.

    The step that is in training then is done too, while instances run empty, unless the run ends `at_once`.
    """

    def __init__(self, steps: int, *, at_once: bool = False) -> None:
        self._left = steps
        self._at_once = at_once
        self.loop: SimulatedLoop | None = None
        """Set by `simulated_loop`."""

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {StepTrained: self._trained}

    def _trained(self, event: StepTrained) -> None:
        self._left -= 1
        if self._left == 0 and self.loop is not None:
            if self._at_once:
                self.loop.halt()
            else:
                self.loop.request_stop()


def simulated_loop(
    control: Control,
    backend: SimulatedBackend,
    *,
    settings: ClusterSettings,
    steps: int,
    opening: Record,
    ledger: Ledger | None = None,
    listeners: Sequence[Listener] = (),
) -> SimulatedLoop:
    """The run loop on a simulated backend of `settings`. `opening` is the ledger's first record."""
    loop = SimulatedLoop(
        control=control,
        store=backend.store,
        backend=backend,
        ledger=ledger or NoLedger(),
        opening=opening,
        stream=EventStream([backend, backend.stats, *listeners]),
        clock=backend.clock,
        settings=LoopSettings(
            steps=steps,
            interval_s=settings.interval_s,
            idle_s=math.inf,
            evaluate_every=0,
            evaluation_backlog=1,
            checkpoint_every=None,
            start_timeout_s=math.inf,
        ),
    )
    for listener in listeners:
        if isinstance(listener, StopAfter):
            listener.loop = loop
    return loop


def run_simulation(
    control: Control,
    settings: ClusterSettings,
    *,
    steps: int,
    opening: Record,
    ledger: Path | None = None,
    listeners: Sequence[Listener] = (),
    max_seconds: float | None = None,
) -> SimulationResult:
    """Simulate to the end, or to `max_seconds` of simulated time. `ledger`: a new file for the records.

    Raises RunFailed when nothing can go on.
    """
    backend = SimulatedBackend(settings)
    if max_seconds is not None:
        backend.end_at(max_seconds)
    loop = simulated_loop(
        control,
        backend,
        settings=settings,
        steps=steps,
        opening=opening,
        ledger=LedgerWriter(ledger) if ledger is not None else None,
        listeners=listeners,
    )
    return backend.stats.result(loop.run(), backend.clock.time)


def build_simulated_session(
    config: Config,
    settings: ClusterSettings,
    paths: RunPaths,
    control: Control | None = None,
) -> ThreadSession:
    """Start the loop in a thread. `control` None: that of `simulated_control`."""
    start, backend = first_start(opening_record(config)), SimulatedBackend(settings)
    began = time.monotonic()

    def speed() -> dict[str, float]:
        wall_s = time.monotonic() - began
        seconds = backend.clock.now()
        return {"simulation/wall_s": wall_s, "simulation/speed": seconds / max(1e-9, wall_s)}

    look_s = max(LOOK_EVERY_S, settings.instances / INSTANCES_PER_LOOK_S)
    monitor = build_monitor(
        config,
        paths,
        backend.clock,
        intervals=Intervals(
            look_s=look_s, sample_s=max(1.0, 20 * look_s), double_after=SAMPLES_BEFORE_DOUBLING
        ),
        redraw=time.monotonic,
        has_rewards=settings.reward is not always_right,
        extra_summary=speed,
    )
    loop = simulated_loop(
        control or simulated_control(config, settings, start),
        backend,
        settings=settings,
        steps=config.run.steps,
        opening=start.opening,
        ledger=LedgerWriter(paths.ledger),
        listeners=[monitor, build_journal(paths, start, monitor, backend.clock)],
    )
    return ThreadSession(monitor, loop.run, loop.request_stop)


def simulated_control(config: Config, settings: ClusterSettings, start: StartPoint) -> Control:
    """The control of a real run, but that it knows what the instances cost unless the config names a file."""
    named = config.coordination.cost_model is not None
    return build_control(
        config,
        start,
        costs=build_costs(config) if named else OnlineCosts(settings.costs, refine=False),
        # Simulated instances never lose a trajectory without saying so, and report lengths rarely.
        patience=Patience(stall_after_s=math.inf, max_retries=config.rollout.max_retries),
        filtered=config.simulation.solved is not None,
    )
