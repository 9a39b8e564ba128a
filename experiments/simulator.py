"""How many trajectories a second of real time are simulated, and how far memory grows over a long run.

Policy staleflow at bound 2, groups of 16, responses lognormal (median 5,000, sigma 0.9) cut at 20,000 tokens,
on instances like an H20 with a model of 14B parameters: 64 of them with batches of 128 groups, and 1,024 with
batches of 1,024. Counted are the trajectories whose response was completed, over the whole run, start and end
included; the ledger is written as in any run. Peak memory is what the process ever held, once a third of the
steps are done and at the end. The goals are meant for a core of its own: where others use it, CPU seconds
tell more than wall seconds, and even those are longer.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

from staleflow.coordination.cost_model import CostModel
from staleflow.experiments.study import Finding, Options, Result, Study
from staleflow.runtime.simulate import simulate_policy
from staleflow.simulation.response_lengths import lognormal
from staleflow.simulation.settings import ClusterSettings, TrainerCosts
from staleflow.telemetry.events import Handlers, StepTrained

CASES = {64: (128, 20_000), 1024: (1024, 5_000)}
"""Groups of a batch, and the goal in trajectories a second, by instances."""
H20_14B = CostModel(k1=6e-8, k2=8.8e-3, k3=4e-4, k4=3e-3, prefill=4e-4, pull=3.0)


class PeakMemory:
    """Notes the process's peak after so many steps."""

    def __init__(self, after: int) -> None:
        self._after = after
        self.early_mb = 0.0

    def handlers(self) -> Handlers:
        """See `Listener`."""
        return {StepTrained: self._trained}

    def _trained(self, event: StepTrained) -> None:
        if event.step + 1 == self._after:
            self.early_mb = peak_mb()


def peak_mb() -> float:
    """Most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 << (20 if sys.platform == "darwin" else 10)
    )


def settings(instances: int, interval_s: float) -> ClusterSettings:
    """The cluster of the module's docstring; training takes about as long as generating a batch."""
    return ClusterSettings(
        instances=instances,
        kv_capacity=297_000,
        max_running=256,
        costs=H20_14B,
        trainer=TrainerCosts(fixed_s=5, token_s=8e-6 * 64 / instances, push_s=3),
        group_size=16,
        lengths=lognormal(median=5000, sigma=0.9, most=20_000, correlation=0.3, truncated=0.01, seed=0),
        prompt_length=1000,
        max_new_tokens=20_000,
        interval_s=interval_s,
        command_s=0.01,
        report_s=0.01,
        reward_s=0.5,
    )


def measure(case: tuple[int, int, float]) -> dict[str, float]:
    """One run of (instances, steps, interval in seconds)."""
    instances, steps, interval_s = case
    batch, goal = CASES[instances]
    watch = PeakMemory(max(1, steps // 3))
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu = time.perf_counter(), time.process_time()
        result = simulate_policy(
            "staleflow",
            settings(instances, interval_s),
            bound=2,
            batch_size=batch,
            steps=steps,
            ledger=Path(folder) / "ledger.jsonl",
            listeners=[watch],
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "instances": instances,
        "interval_s": interval_s,
        "trajectories": result.finished,
        "simulated_s": result.seconds,
        "cycles": result.cycles,
        "per_wall_s": result.finished / wall,
        "per_cpu_s": result.finished / cpu,
        "goal": goal,
        "peak_mb_early": watch.early_mb,
        "peak_mb": peak_mb(),
    }


def measure_simulator(options: Options) -> Result:
    """Each size in a process of its own: its peak of memory would hide that of the next."""
    findings: list[Finding] = []
    for instances in CASES:
        options.say(f"{instances:,} instances")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, ((instances, 2 if options.quick else 8, 1.0),))
        note = f"{row['trajectories']:,} trajectories, {row['cycles']:,} cycles, {row['simulated_s']:,.0f} s"
        findings += [
            Finding(
                name=f"simulated trajectories per CPU second, {instances:,} instances",
                value=row["per_cpu_s"],
                unit="/s",
                goal=None if options.quick else row["goal"],
                wanted="at least",
                note=note,
            ),
            Finding(
                name=f"the same per second of wall time, {instances:,}", value=row["per_wall_s"], unit="/s"
            ),
            Finding(
                name=f"peak memory, {instances:,} instances",
                value=row["peak_mb"],
                unit="MB",
                note=f"{row['peak_mb_early']:.0f} MB after a third of the steps",
            ),
        ]
    return Result(findings=tuple(findings))


SIMULATOR = Study(
    name="simulator",
    question="How many trajectories are simulated in a second, and does memory grow over a long run?",
    script=measure_simulator,
)
