"""A simulated run from a config to a finished run folder: what `staleflow simulate` does.

Invariants: what can be wrong is refused before anything is created; the folder has what a real run's has, but
for checkpoints, logs and evaluations, and `simulation.json` beside it, which says what it was reckoned with;
the same config and seed give the same ledger, byte for byte, and the same rows but for the real time taken.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.coordination.control import Control
from staleflow.runtime.assembly import kept_bound
from staleflow.runtime.assembly.simulated import build_simulated_session
from staleflow.runtime.launch import run_folder, say_how_it_ended, watched
from staleflow.runtime.preflight import prepare_simulation
from staleflow.runtime.start import RunPaths
from staleflow.simulation.bounds import SIDES, find_bounds
from staleflow.simulation.settings import ClusterSettings
from staleflow.storage.provenance import provenance
from staleflow.telemetry.jsonl import JsonlSink
from staleflow.telemetry.progress import make_progress

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
            lambda: build_simulated_session(config, settings, paths), _unless_online(config), folder, console
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
    session = build_simulated_session(config, settings, paths, control)
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
