"""How well a simulated run tells what a real run does, on the same lengths, costs and latencies.

Two comparisons, each of a real run on Ray with its simulation:

- *scripted*: the fake engine and a trainer that sleep for the time that a cost model says, so that only the
  system itself is at work. The simulation gets the same cost model, the run's own lengths, and the latencies
  between its processes.
- *torch*: a tiny model that really generates and is really trained. What things cost is learned on one run
  (its refined cost model, its trainer, its pulls), with another seed than the run that is simulated; of that
  one only lengths and rewards are taken.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from staleflow.config import Config, load_config
from staleflow.coordination.control import Patience
from staleflow.coordination.cost_model import CostModel
from staleflow.errors import RunFailed, UserError
from staleflow.experiments.recorded import Recorded, Replay, read_recorded
from staleflow.experiments.simulated_beside_real import Comparison, at_the_bound, staleness_table
from staleflow.experiments.study import Options, Result, Study
from staleflow.reporting.load import RunData, load_run
from staleflow.runtime.assembly import build_control, opening_record
from staleflow.runtime.launch_simulation import simulate_into
from staleflow.runtime.start import first_start
from staleflow.simulation.settings import ClusterSettings, TrainerCosts
from staleflow.training.models import model_folder

COMMON = (
    "evaluation.every=0",
    "checkpoint.every=0",
    "telemetry.console=off",
    "telemetry.wandb.mode=disabled",
    "cluster.start_timeout_s=600",  # the machine may be busy
)
SCRIPTED_COSTS = CostModel(k1=4e-6, k2=0.012, k3=0.0015, k4=0.008, prefill=5e-5, pull=0.15)
SCRIPTED = (
    "rollout.engine=fake",
    "rollout.instances=3",
    "rollout.max_new_tokens=400",
    "rollout.kv_capacity_tokens=3000",
    "rollout.max_running=24",
    "rollout.fake.lengths.kind=lognormal",
    "rollout.fake.lengths.mean=80",
    "rollout.fake.lengths.sigma=0.8",
    "rollout.fake.lengths.max=400",
    "training.trainer=staleflow.experiments.sleeping_trainer.SleepingTrainer",
    "training.dynamic_sampling=false",
    "coordination.refine_costs=false",
    "staleness.bound=2",
    "data.batch_size=8",
    "data.group_size=4",
)
TORCH = ("rollout.instances=2", "staleness.bound=1", "data.batch_size=16", "data.group_size=8")
CONTEXT = 4096
"""Tokens that the scripted run's model would read, if it were read."""


def measure_fidelity(options: Options) -> Result:
    """Both comparisons."""
    steps = 5 if options.quick else 20
    with tempfile.TemporaryDirectory(prefix="staleflow-") as name:
        folder = Path(name)
        options.say(f"a scripted run of {steps} steps")
        scripted = _scripted(folder, steps)
        options.say(f"two torch runs of {steps} steps")
        torch = _torch(folder, steps)
    comparisons = (scripted, torch)
    return Result(
        findings=tuple(f for c in comparisons for f in c.findings(judged=not options.quick)),
        tables=(*(c.table() for c in comparisons), staleness_table(comparisons)),
        notes=(
            *(c.explanation() for c in comparisons),
            *(note for c in comparisons for note in c.notes),
            *(at_the_bound(c) for c in comparisons),
            f"On {os.cpu_count()} cores; what else ran on them is in the load averages, beside the runs' own "
            "processes.",
            *(("Quick: few steps, so nothing is judged.",) if options.quick else ()),
        ),
    )


def _load() -> float:
    """Processes that want a core, over the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


# ---------------------------------------------------------------------- the two comparisons


def _scripted(folder: Path, steps: int) -> Comparison:
    costs = folder / "costs.json"
    costs.write_text(json.dumps({"model": asdict(SCRIPTED_COSTS)}), encoding="utf-8")
    files = (f"rollout.fake.cost_model={costs}", f"coordination.cost_model={costs}")
    source = f"model.source={_longer_model(folder)}"
    config, load = _run(folder, "scripted", (*SCRIPTED, *files, source, f"run.steps={steps}"))
    real, recorded = load_run(folder / "scripted"), read_recorded(folder / "scripted")
    settings = cluster_of(config, recorded, learned=Learned.of(recorded, SCRIPTED_COSTS, real))
    simulated = _simulate(folder / "scripted-simulated", config, settings)
    notes = (_latencies("scripted", settings), f"scripted: load average from {load}.")
    return Comparison(name="scripted", real=real, simulated=simulated, notes=notes)


def _torch(folder: Path, steps: int) -> Comparison:
    overrides = (*TORCH, f"run.steps={steps}")
    _, first_load = _run(folder, "learned", (*overrides, "run.seed=1"))
    config, load = _run(folder, "torch", (*overrides, "run.seed=0"))
    other, recorded = load_run(folder / "learned"), read_recorded(folder / "torch")
    other_recorded = read_recorded(folder / "learned")
    costs = replace(refined_costs(other), pull=other_recorded.pull_s)
    learned = Learned.of(other_recorded, costs, other)
    # A measured pull has the rebuilding of KV in it.
    settings = replace(cluster_of(config, recorded, learned=learned), on_pull="keep_kv")
    simulated = _simulate(folder / "torch-simulated", config, settings)
    named = ", ".join(f"{k} {v:.3g}" for k, v in asdict(costs).items())
    return Comparison(
        name="torch",
        real=load_run(folder / "torch"),
        simulated=simulated,
        notes=(
            f"torch: the other run's cost model in seconds: {named}.",
            _latencies("torch", settings),
            f"torch: load average from {first_load} while costs were learned, and from {load} in the run"
            " that is simulated. Costs learned under one load do not hold under another.",
        ),
    )


def _run(folder: Path, name: str, overrides: Sequence[str]) -> tuple[Config, str]:
    """A real run; returns its config, and the load of the machine before and after. Raises RunFailed."""
    before = _load()
    arguments = [*overrides, *COMMON, f"run.output_dir={folder}", f"run.name={name}"]
    command = [sys.executable, "-P", "-m", "staleflow.cli", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"the run {name} ended with exit code {done.returncode}: {done.stderr.strip()}")
    return load_config([], arguments, {}), f"{before:.1f} to {_load():.1f}"


def _longer_model(folder: Path) -> Path:
    """The built-in model's folder, with room for the scripted lengths; its weights are never read."""
    target = folder / "model"
    shutil.copytree(model_folder("builtin:sums"), target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8"
    )
    return target


def _simulate(folder: Path, config: Config, settings: ClusterSettings) -> RunData:
    folder.mkdir()
    # The coordinator knows of costs what it knew in the real run.
    control = build_control(
        config, first_start(opening_record(config)), patience=Patience(stall_after_s=math.inf)
    )
    simulate_into(folder, config, settings, control)
    return load_run(folder)


# ---------------------------------------------------------------------- what a simulation is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What things cost, measured on a run."""

    costs: CostModel
    trainer: TrainerCosts
    one_way_s: float
    reward_s: float

    @classmethod
    def of(cls, recorded: Recorded, costs: CostModel, run: RunData) -> Learned:
        """Of a run whose instances cost so much."""
        return cls(
            costs=costs,
            trainer=recorded.trainer(),
            one_way_s=recorded.one_way_s(mean_step_s(run, costs)),
            reward_s=recorded.reward_s,
        )


def cluster_of(config: Config, recorded: Recorded, *, learned: Learned) -> ClusterSettings:
    """The simulated cluster that stands for a real run, with costs learned on it or on another."""
    rollout, work = config.rollout, Replay(recorded)
    return ClusterSettings(
        instances=rollout.instances,
        kv_capacity=rollout.kv_capacity_tokens,
        max_running=rollout.max_running,
        costs=learned.costs,
        trainer=learned.trainer,
        group_size=config.data.group_size,
        lengths=work.lengths,
        prompt_length=max(1, round(recorded.prompt_length)),
        max_new_tokens=rollout.max_new_tokens,
        surplus=config.redundancy.members,
        on_pull=rollout.on_pull,
        interval_s=config.coordination.interval_ms / 1000,
        command_s=learned.one_way_s,
        report_s=learned.one_way_s,
        progress_interval_s=rollout.progress_interval_s,
        reward_s=learned.reward_s,
        reward=work.reward,
    )


def refined_costs(run: RunData) -> CostModel:
    """The cost model that a run ended with. Raises UserError where it did not end."""
    names = ("k1", "k2", "k3", "k4", "prefill")
    if any(f"coord/{name}" not in run.summary for name in names):
        raise UserError(f"{run.folder} has no summary with a cost model: give a run that ended by itself")
    return CostModel(**{name: float(run.summary[f"coord/{name}"]) for name in names})


def mean_step_s(run: RunData, costs: CostModel) -> float:
    """Seconds of a decode step at the load that the run's samples show on average."""
    running = [
        value for row in run.instances for key, value in row.items() if key.endswith("/running") and value > 0
    ]
    return costs.step_s(max(1, round(sum(running) / len(running))), 0) if running else 0.0


def _latencies(name: str, settings: ClusterSettings) -> str:
    trainer = settings.trainer
    return (
        f"{name}: simulated with {settings.command_s * 1e3:.1f} ms from coordinator to instance and back, "
        f"{settings.reward_s * 1e3:.0f} ms to a reward, and a trainer of {trainer.fixed_s:.2f} s + "
        f"{trainer.token_s * 1e3:.3f} ms a token + {trainer.push_s * 1e3:.0f} ms for a push."
    )


FIDELITY = Study(
    name="fidelity",
    question="Does a simulated run tell what a real one does?",
    script=measure_fidelity,
)
