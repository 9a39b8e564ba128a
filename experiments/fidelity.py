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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from staleflow.config import Config, load_config
from staleflow.coordination.control import Patience
from staleflow.coordination.cost_model import CostModel
from staleflow.errors import RunFailed, UserError
from staleflow.experiments.recorded import Recorded, Replay, read_recorded
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.reporting.headline import headline
from staleflow.reporting.load import RunData, load_run
from staleflow.reporting.shares import CAUSES, total, working_seconds
from staleflow.runtime.assembly import build_control
from staleflow.runtime.launch import opening_record
from staleflow.runtime.simulated import simulate_into
from staleflow.runtime.start import first_start
from staleflow.simulation.settings import ClusterSettings, TrainerCosts
from staleflow.training.models import model_folder

THROUGHPUT_GOAL = 0.15
"""Largest deviation of the simulated throughput."""
STALENESS_GOAL = 0.15
"""Largest total variation distance of the distributions of staleness."""
SKIPPED = 3
"""Steps left out at the start and at the end of the trimmed throughput."""

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
        tables=(*(c.table() for c in comparisons), _staleness_table(comparisons)),
        notes=(
            *(c.explanation() for c in comparisons),
            *(note for c in comparisons for note in c.notes),
            *(_at_the_bound(c) for c in comparisons),
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
    command = [sys.executable, "-m", "staleflow.cli", "run", *arguments]
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


def _at_the_bound(comparison: Comparison) -> str:
    shares = [staleness(run).get(run.bound or 0, 0.0) for run in (comparison.real, comparison.simulated)]
    return (
        f"{comparison.name}: {shares[0]:.0%} of the real and {shares[1]:.0%} of the simulated trajectories "
        "were as stale as the bound allows; the larger that share, the less the distance of the two says."
    )


def _latencies(name: str, settings: ClusterSettings) -> str:
    trainer = settings.trainer
    return (
        f"{name}: simulated with {settings.command_s * 1e3:.1f} ms from coordinator to instance and back, "
        f"{settings.reward_s * 1e3:.0f} ms to a reward, and a trainer of {trainer.fixed_s:.2f} s + "
        f"{trainer.token_s * 1e3:.3f} ms a token + {trainer.push_s * 1e3:.0f} ms for a push."
    )


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A real run beside its simulation."""

    name: str
    real: RunData
    simulated: RunData
    notes: tuple[str, ...] = ()

    def findings(self, *, judged: bool) -> tuple[Finding, ...]:
        """Throughput and staleness, with their goals."""
        rates = [throughput(run) for run in (self.real, self.simulated)]
        trimmed = [throughput(run, skip=SKIPPED) for run in (self.real, self.simulated)]
        return (
            Finding(
                name=f"{self.name}: throughput, deviation of the simulation",
                value=100 * deviation(*rates),
                unit="%",
                goal=100 * THROUGHPUT_GOAL if judged else None,
                note=f"{rates[0]:,.0f} trained tokens/s in the real run, {rates[1]:,.0f} simulated",
            ),
            Finding(
                name=f"{self.name}: the same without {SKIPPED} steps at either end",
                value=100 * deviation(*trimmed),
                unit="%",
                note=f"{trimmed[0]:,.0f} and {trimmed[1]:,.0f} trained tokens/s",
            ),
            Finding(
                name=f"{self.name}: staleness, total variation distance",
                value=total_variation(staleness(self.real), staleness(self.simulated)),
                unit="",
                goal=STALENESS_GOAL if judged else None,
                note="of the trained trajectories, from the ledgers",
            ),
        )

    def table(self) -> Table:
        """The same figures of both."""
        rows = []
        for title, measure in FIGURES:
            values = [measure(run) for run in (self.real, self.simulated)]
            ratio = values[1] / values[0] if values[0] else math.nan
            rows.append((title, *values, ratio if math.isfinite(ratio) else ""))
        return Table(
            title=f"{self.name}: real and simulated",
            columns=("figure", "real", "simulated", "simulated / real"),
            rows=tuple(rows),
        )

    def explanation(self) -> str:
        """Where the seconds of a step differ most."""
        real, simulated = step_parts(self.real), step_parts(self.simulated)
        differences = {part: simulated[part] - real[part] for part in real}
        whole = sum(simulated.values()) - sum(real.values())
        part = max(differences, key=lambda name: abs(differences[name]))
        speeds = [decode_speed(run) for run in (self.real, self.simulated)]
        return (
            f"{self.name}: a simulated step takes {whole:+.2f} s of {sum(real.values()):.2f} s; the largest "
            f"part of that is {part} ({differences[part]:+.2f} s). An instance at work decoded "
            f"{speeds[0]:,.0f} tokens/s in the real run and {speeds[1]:,.0f} in the simulated one."
        )


def deviation(real: float, simulated: float) -> float:
    """Of the simulated figure, as a share of the real one."""
    return abs(simulated / real - 1) if real else math.inf


def total_variation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Half the sum of the differences of two distributions (shares by value): 0 the same, 1 disjoint."""
    return sum(abs(one.get(v, 0.0) - other.get(v, 0.0)) for v in {*one, *other}) / 2


def staleness(run: RunData) -> dict[int, float]:
    """Shares of the trained trajectories by staleness."""
    counts = Counter(t.staleness for t in run.trained)
    return {lag: count / len(run.trained) for lag, count in sorted(counts.items())}


def throughput(run: RunData, *, skip: int = 0) -> float:
    """Trained tokens per second, from when all parts were up, or between two steps."""
    if skip == 0 or len(run.train) <= 2 * skip:
        return headline(run).tokens_per_s or 0.0
    rows = run.train[skip - 1 : len(run.train) - skip]
    first, last = rows[0]["train/step"], rows[-1]["train/step"]
    tokens = sum(t.tokens for t in run.trained if first < t.step <= last)
    seconds = sum(row["time/step_s"] for row in rows[1:])
    return tokens / seconds if seconds else 0.0


def step_parts(run: RunData) -> dict[str, float]:
    """Mean seconds of a step, by what they went to."""
    steps = max(1, len(run.train))
    seconds = {
        f"waiting ({cause})": (total(run.train, f"time/waiting/{cause}_s") or 0.0) / steps for cause in CAUSES
    }
    whole = (working_seconds(run) or 0.0) / steps
    # A simulated update has the batch's way to the trainer in it, and that of the answer.
    return seconds | {"the trainer, with the way there and back": max(0.0, whole - sum(seconds.values()))}


def decode_speed(run: RunData) -> float:
    """Generated tokens per second of decoding on one instance."""
    tokens, seconds = run.summary.get("tokens/generated", 0), total(run.train, "time/decoding_s")
    return tokens / seconds if seconds else 0.0


Measure = Callable[[RunData], float]


def _mean_of(name: str) -> Measure:
    return lambda run: (total(run.train, name) or 0.0) / max(1, len(run.train))


def _share_of(name: str) -> Measure:
    return lambda run: getattr(headline(run).shares, name) or 0.0


def _sum_of(name: str) -> Measure:
    return lambda run: total(run.train, name) or 0.0


FIGURES: tuple[tuple[str, Measure], ...] = (
    ("trained tokens/s", throughput),
    ("generated tokens/s", lambda run: headline(run).generated_per_s or 0.0),
    ("seconds of a step", lambda run: (working_seconds(run) or 0.0) / max(1, len(run.train))),
    ("… of it update", _mean_of("timing_s/update")),
    ("… of it push", _mean_of("timing_s/push")),
    ("… of it waiting for a batch", _mean_of("time/trainer_waiting_s")),
    ("tokens/s of an instance at work", decode_speed),
    ("instances idle, share", _share_of("idle")),
    ("decoding, share", _share_of("decoding")),
    ("pulling, share", _share_of("pulling")),
    ("staleness, mean", lambda run: headline(run).staleness_mean or 0.0),
    ("pulls", _sum_of("coord/pull_count")),
    ("interrupts", _sum_of("coord/interrupt_count")),
    ("preemptions", _sum_of("rollout/preemptions")),
    ("mean length of a trained response", lambda run: headline(run).lengths[1] or 0.0),
)


def _staleness_table(comparisons: Sequence[Comparison]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for comparison in comparisons:
        for kind, run in (("real", comparison.real), ("simulated", comparison.simulated)):
            shares = staleness(run)
            rows.append((f"{comparison.name}, {kind}", *(shares.get(lag, 0.0) for lag in range(3))))
    return Table(
        title="Shares of trained trajectories by staleness",
        columns=("run", "0", "1", "2"),
        rows=tuple(rows),
    )


FIDELITY = Study(
    name="fidelity",
    question="Does a simulated run tell what a real one does?",
    script=measure_fidelity,
)
