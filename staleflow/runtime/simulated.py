"""A simulated run from a config to a finished run folder: what `staleflow simulate` does.

Invariants: what can be wrong is refused before anything is created; the folder has what a real run's has, but
for checkpoints, logs and evaluations, and `simulation.json` beside it, which says what it was reckoned with;
the same config and seed give the same ledger, byte for byte, and the same rows but for the real time taken.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.estimates import OnlineCosts
from staleflow.runtime.assembly import build_control, build_costs, build_journal, build_monitor, kept_bound
from staleflow.runtime.backends.simulated import SimulatedBackend
from staleflow.runtime.launch import opening_record, run_folder, say_how_it_ended, watched
from staleflow.runtime.preflight import prepare_simulation
from staleflow.runtime.session import ThreadSession
from staleflow.runtime.simulate import simulated_loop
from staleflow.runtime.start import RunPaths, StartPoint, first_start
from staleflow.simulation.bounds import SIDES, find_bounds
from staleflow.simulation.settings import ClusterSettings, always_right
from staleflow.storage.ledger import LedgerWriter
from staleflow.storage.provenance import provenance
from staleflow.telemetry.jsonl import JsonlSink
from staleflow.telemetry.monitor import Intervals
from staleflow.telemetry.progress import make_progress
from staleflow.telemetry.utilization import LOOK_EVERY_S

INSTANCES_PER_LOOK_S = 250.0
"""Looking at so many instances a simulated second is cheap beside what they do in it."""
SAMPLES_BEFORE_DOUBLING = 200


def simulate_run(config: Config, *, clean: bool) -> int:
    """Simulate to the end; returns the exit code. Raises UserError before anything is made, or RunFailed."""
    settings = prepare_simulation(config, clean=clean)
    with run_folder(config, resume=False, clean=clean) as folder:
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})
        folder.write_config(config.to_yaml(), provenance())
        about = json.dumps(describe(config, settings), indent=1, ensure_ascii=False)
        folder.simulation.write_text(about + "\n", encoding="utf-8")
        paths = RunPaths(
            name=folder.name,
            ledger=folder.ledger,
            checkpoints=folder.checkpoints,
            logs=folder.logs,
            journal=folder.journal if config.telemetry.journal else None,
        )
        console = make_progress(config.telemetry.console)
        reason = watched(
            lambda: SimulatedSession(config, settings, paths), _unless_online(config), folder, console
        )
    return say_how_it_ended(config, folder, reason)


def simulate_into(folder: Path, config: Config, settings: ClusterSettings, control: Control) -> str:
    """Simulate `settings`, whatever the config says of machines, into an existing empty folder: config,
    ledger, journal and rows, without console, report and trace. Returns the finish reason; raises RunFailed.
    """
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    paths = RunPaths(
        name=folder.name,
        ledger=folder / "ledger.jsonl",
        checkpoints=folder,
        logs=folder,
        journal=folder / "journal.jsonl",
    )
    session = SimulatedSession(config, settings, paths, control)
    sink = JsonlSink(folder / "metrics.jsonl")
    try:
        while True:
            reason = session.outcome()  # before the look, so that the look after the end misses nothing
            for row in session.look(0.1)[0]:
                sink.write(row)
            if reason is not None:
                return reason
    finally:
        sink.close()


class SimulatedSession(ThreadSession):
    """The simulated cluster in a thread."""

    def __init__(
        self, config: Config, settings: ClusterSettings, paths: RunPaths, control: Control | None = None
    ) -> None:
        """`control` None: that of `simulated_control`."""
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
        super().__init__(monitor, loop.run, loop.request_stop)


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


def describe(config: Config, settings: ClusterSettings) -> dict[str, Any]:
    """What a run is reckoned with, as plain values for simulation.json."""
    simulation = config.simulation
    bounds = find_bounds(settings, bound=kept_bound(config), batch_size=config.data.batch_size)
    colocated = config.coordination.policy == "sync"
    rollout, training = simulation.rollout_gpus, simulation.training_gpus
    if colocated:
        rollout = training = rollout + training
    gpus = {"kind": simulation.gpu, "rollout": rollout, "training": training, "shared": colocated}
    return {
        "costs": _costs_text(config),
        "gpus": None if simulation.costs is not None else gpus,
        "instances": settings.instances,
        "kv_capacity": settings.kv_capacity,
        "max_running": settings.max_running,
        "cost_model": asdict(settings.costs),
        "trainer": asdict(settings.trainer),
        "bounds": {
            **{side: _finite(bounds.rate(side)) for side in SIDES},
            "binding": bounds.binding,
            "best_running": bounds.best_running,
        },
    }


def _costs_text(config: Config) -> str:
    simulation = config.simulation
    if simulation.costs is not None:
        return f"the profile {simulation.costs}"
    parallel = f", {simulation.tensor_parallel} GPUs an instance" if simulation.tensor_parallel > 1 else ""
    return f"roofline of {simulation.model} on {simulation.gpu}{parallel}"


def _unless_online(config: Config) -> Config:
    """Without W&B, whose service takes longer to start than most simulations, unless it is asked for."""
    telemetry = config.telemetry
    if telemetry.wandb.mode == "online":
        return config
    wandb = telemetry.wandb.model_copy(update={"mode": "disabled"})
    return config.model_copy(update={"telemetry": telemetry.model_copy(update={"wandb": wandb})})


def _finite(rate: float) -> float | None:
    """None for what sets no bound, which JSON could not say."""
    return rate if math.isfinite(rate) else None
