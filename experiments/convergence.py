"""How training converges under several staleness bounds: real runs of the built-in task, and their curves.

Invariants: every run is a normal one, made by `staleflow sweep` and audited; a finished run is never made
again, so a study that was interrupted goes on; the page is made of what the runs wrote and nothing else.

Which clock. On a machine where rollout and training share two cores, how old the data are is decided by what
the cores have left, and a model that collapses even makes its own data young: nearly all of its groups are
filtered, rollout becomes the bottleneck, and the buffers run empty. So the parts of a run that is compared
share one process and a virtual clock, on which rollout is fast enough to fill the buffers: each bound then
shows about the oldest data that it allows, and the same command gives the same curves. Model, rollout,
rewards, protocol, coordination and training are those of any run. Two runs on Ray, of the least and the
largest bound, stand beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

from staleflow.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, RunFailed, UserError
from staleflow.experiments.convergence_figure import convergence_figure
from staleflow.experiments.curves import DONE, CurveSetting, RunCurves, read_run, settings
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.experiments.verdicts import COLLAPSED, MARGIN, PAPER, Judgement, collapsed, judge

OUTPUT = Path("runs")
SPANS = 4
"""Parts of a run for which staleness is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every bound, learning rate and seed once."""

    name: str
    bounds: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    overrides: tuple[str, ...]
    together: bool = False
    """Some at the same time: what comes out does not depend on what else the machine does."""

    def parts(self) -> list[Sweep]:
        """What may be made at the same time, each in a folder of its own."""
        if not self.together:
            return [self]
        return [
            replace(
                self,
                name=f"{self.name}/{_listed((rate, seed))}",
                rates=(rate,),
                seeds=(seed,),
                together=False,
            )
            for rate, seed in product(self.rates, self.seeds)
        ]

    def command(self, folder: Path) -> list[str]:
        """`staleflow sweep` that makes these runs in `folder`/name."""
        return [
            *(
                sys.executable,
                "-P",
                "-m",
                "staleflow.cli",
                "sweep",
                f"run.steps={self.steps}",
                *self.overrides,
            ),
            *("--eta", _listed(self.bounds), "--axis", f"training.learning_rate={_listed(self.rates)}"),
            *("--seeds", _listed(self.seeds), "--name", self.name, "--output-dir", str(folder), "--resume"),
        ]

    def size(self) -> int:
        """Runs."""
        return len(self.bounds) * len(self.rates) * len(self.seeds)


BOUNDS = (0, 1, 2, 3, 10)
_COMMON = ("training.warmup_steps=5", "telemetry.wandb.mode=disabled", "checkpoint.every=0")
_VIRTUAL = ("cluster.runtime=inline", "rollout.instances=6", *_COMMON)
_FULL = ("data.batch_size=12", "evaluation.every=8", "evaluation.prompts=128")
FULL = (
    Sweep(
        name="virtual",
        bounds=BOUNDS,
        rates=(8e-5, 1.5e-4),
        seeds=(0, 1, 2),
        steps=40,
        overrides=(*_VIRTUAL, *_FULL),
        together=True,
    ),
    Sweep(name="ray", bounds=(0, 10), rates=(1.5e-4,), seeds=(0,), steps=40, overrides=(*_COMMON, *_FULL)),
)
QUICK = (
    Sweep(
        name="virtual",
        bounds=BOUNDS,
        rates=(3e-4,),
        seeds=(0, 1, 2),
        steps=24,
        overrides=(*_VIRTUAL, "data.batch_size=8", "evaluation.every=6", "evaluation.prompts=128"),
        together=True,
    ),
)


def measure_convergence(options: Options) -> Result:
    """Make the runs that are missing, and read all. `options.run`: the folder of the study's runs."""
    folder = options.run or OUTPUT / ("convergence-quick" if options.quick else "convergence")
    sweeps = QUICK if options.quick else FULL
    began, found = time.monotonic(), []
    for sweep in sweeps:
        options.say(
            f"{sweep.size()} runs of {sweep.steps} steps in {folder / sweep.name}; finished ones stay"
        )
        make_runs(sweep, folder, options.say)
        found.append(read_runs(sweep, folder))
    options.say(f"{sum(map(len, found))} runs are there, after {time.monotonic() - began:,.0f} s")
    return summarise(sweeps, found, quick=options.quick)


def make_runs(sweep: Sweep, folder: Path, say: Callable[[str], None]) -> None:
    """Make those that are not there yet. What each part prints goes to its output.txt.

    Raises UserError where the sweep was refused, and KeyboardInterrupt where it was stopped. Runs that
    failed show when they are read.
    """
    parts = sweep.parts()
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        codes = list(pool.map(lambda part: _make_part(part, folder, say), parts))
    if EXIT_INTERRUPTED in codes:
        raise KeyboardInterrupt
    if EXIT_USER_ERROR in codes:
        raise UserError(f"the runs in {folder / sweep.name} cannot be made, see above: name another --run")


def _make_part(part: Sweep, folder: Path, say: Callable[[str], None]) -> int:
    """The exit code of `staleflow sweep`; what it says on standard error is said on."""
    # One thread in each process, as in `make run`: two on a shared core are slower than one.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    (folder / part.name).mkdir(parents=True, exist_ok=True)
    with (
        (folder / part.name / "output.txt").open("a", encoding="utf-8") as output,
        subprocess.Popen(
            part.command(folder), stdout=output, stderr=subprocess.PIPE, text=True, env=environ
        ) as made,
    ):
        for line in made.stderr or ():
            if line.strip():
                say(line.strip())
    return made.returncode


def read_runs(sweep: Sweep, folder: Path) -> list[RunCurves]:
    """All runs of the sweep. Raises RunFailed, naming what is missing."""
    wanted = {(b, r, s) for b in sweep.bounds for r in sweep.rates for s in sweep.seeds}
    found = {}
    for part in sweep.parts():
        for metrics in sorted((folder / part.name).glob("*/metrics.jsonl")):
            run = read_run(metrics.parent)
            found[run.bound, run.rate, run.seed] = run
    if missing := sorted(wanted - found.keys()):
        told = ", ".join(f"η = {b}, learning rate {r:g}, seed {s}" for b, r, s in missing)
        raise RunFailed(f"runs are missing in {folder / sweep.name}: {told}; see output.txt there")
    return [found[key] for key in sorted(wanted)]


# ---------------------------------------------------------------------- what they say


def summarise(sweeps: Sequence[Sweep], found: Sequence[Sequence[RunCurves]], *, quick: bool) -> Result:
    """Findings, tables, figure and notes of what was read, one list of runs for each sweep."""
    compared = settings(found[0])
    judgements = [judge(s, by_bound) for by_bound in _by_rate(compared) for s in PAPER]
    tables = [
        _verdict_table(judgements, quick),
        _outcome_table("On the virtual clock", compared),
        _staleness_table(compared, sweeps[0].steps),
    ]
    tables += [_outcome_table("On Ray", settings(runs)) for runs in found[1:]]
    every = [run for runs in found for run in runs]
    return Result(
        findings=(_audited(every), *_distances(compared, quick)),
        tables=tuple(tables),
        figures={"convergence.svg": convergence_figure(compared)},
        notes=tuple(_notes(sweeps, every, quick)),
    )


def _by_rate(compared: Sequence[CurveSetting]) -> list[dict[int, CurveSetting]]:
    rates = sorted({s.rate for s in compared})
    return [{s.bound: s for s in compared if s.rate == rate} for rate in rates]


def _audited(runs: Sequence[RunCurves]) -> Finding:
    return Finding(
        name=f"violations found by the audits of all {len(runs)} runs",
        value=sum(run.violations for run in runs),
        unit="",
        goal=0,
        note="`staleflow audit`: no trajectory was trained on that was older than η allows",
    )


def _distances(compared: Sequence[CurveSetting], quick: bool) -> list[Finding]:
    """How far below η = 0 each bound ends; those of which the paper says that they converge are judged."""
    converging = PAPER[0].bounds
    return [
        Finding(
            name=f"accuracy at the end, η = {s.bound} against η = 0, learning rate {s.rate:g}",
            value=100 * (s.end - by_bound[0].end),
            unit="points",
            goal=-100 * MARGIN if s.bound in converging and not quick else None,
            wanted="at least",
            note=f"medians of {len(s.runs)} seeds: {s.end:.3f} and {by_bound[0].end:.3f}",
        )
        for by_bound in _by_rate(compared)
        for s in by_bound.values()
        if s.bound > 0
    ]


def _verdict_table(judgements: Sequence[Judgement], quick: bool) -> Table:
    return Table(
        title="What the paper says, and what these runs say",
        columns=("learning rate", "the paper (arXiv 2601.12784)", "these runs", "in words"),
        rows=tuple((f"{j.rate:g}", j.statement.text, j.verdict, j.reason) for j in judgements),
        note="The rules, on medians over seeds of sampled held-out accuracy: a bound collapses when accuracy "
        f"falls below {COLLAPSED:g} of where it began, at any evaluation; else it converges like synchronous "
        f"training when it ends no more than {MARGIN:g} below η = 0; else it falls behind."
        + (" Quick: small and short runs, so this is a hint and no verdict." if quick else ""),
    )


def _outcome_table(title: str, compared: Sequence[CurveSetting]) -> Table:
    return Table(
        title=f"{title}: held-out accuracy, sampled",
        columns=(
            *("learning rate", "η", "seeds", "at first", "lowest", "at the end", "least", "most"),
            *("seeds that collapsed", "oldest data", "filtered per trained group"),
        ),
        rows=tuple(
            (
                f"{s.rate:g}",
                s.bound,
                len(s.runs),
                s.start,
                min(s.accuracy.median),
                s.end,
                min(run.end for run in s.runs),
                max(run.end for run in s.runs),
                sum(collapsed(run.accuracy.values(), run.start) for run in s.runs),
                max(run.worst_staleness for run in s.runs),
                sum(run.filtered for run in s.runs) / len(s.runs),
            )
            for s in compared
        ),
        note="Accuracies are medians over seeds; oldest data: the largest staleness that was trained on.",
    )


def _staleness_table(compared: Sequence[CurveSetting], steps: int) -> Table:
    edges = [steps * part // SPANS for part in range(SPANS + 1)]
    spans = [(first, last - 1) for first, last in pairwise(edges)]
    return Table(
        title="Staleness over the run, on the virtual clock: mean of what was trained on",
        columns=("learning rate", "η", *(f"steps {first} to {last}" for first, last in spans)),
        rows=tuple(
            (f"{s.rate:g}", s.bound, *(_or_none(s.staleness(first, last)) for first, last in spans))
            for s in compared
        ),
        note="The first η + 1 batches are generated by the initial weights, so staleness rises by one with "
        "each step until it reaches η.",
    )


def _or_none(value: float | None) -> str | float:
    return "none" if value is None else value


def _notes(sweeps: Sequence[Sweep], runs: Sequence[RunCurves], quick: bool) -> list[str]:
    virtual = sweeps[0]
    early = [run for run in runs if run.reason != DONE[0]]
    resumed = [run for run in runs if run.attempts > 1]
    return [
        "What the paper says is said of Qwen models of 14 to 32 billion parameters and responses of up to "
        "20,000 tokens. Here a model of 150,000 parameters learns a habit that its warm start left mixed "
        "(see scripts/make_warm_start.py). What carries over is how staleness acts, not "
        "where it begins to hurt.",
        f"Settings that differ from the default config: {_settings_text(virtual)}; learning rates "
        f"{_listed(virtual.rates)}, seeds {_listed(virtual.seeds)}, {virtual.steps} steps.",
        "Virtual clock: all parts share a process, and rollout is given enough instances to fill the "
        "buffers, so that data are about as old as η allows; the table of staleness says how old they "
        "were. On a machine where rollout and training share the cores, staleness follows the load. A "
        "model that collapses makes its own data younger, because most of its groups are filtered and "
        "rollout becomes the bottleneck.",
        "The reward in the figure is the mean of everything that was scored, filtered groups included. The "
        "reward of what is trained on says little: groups whose members all fail, or all succeed, are "
        "dropped before (dynamic sampling), however good the model is.",
        *((f"Ended early, because they only filtered: {_named(early, steps=True)}.",) if early else ()),
        *((f"Interrupted and resumed: {_named(resumed)}; buffers begin empty again.",) if resumed else ()),
        *(("Quick: small and short runs; nothing is judged by them.",) if quick else ()),
    ]


def _settings_text(sweep: Sweep) -> str:
    return ", ".join(f"`{override}`" for override in sweep.overrides if not override.startswith("telemetry."))


def _named(runs: Sequence[RunCurves], *, steps: bool = False) -> str:
    return "; ".join(f"{run.folder.name} ({run.steps} steps)" if steps else run.folder.name for run in runs)


def _listed(values: Sequence[float]) -> str:
    """As an axis of a sweep; JSON numbers are YAML numbers, exponents included."""
    return ",".join(map(json.dumps, values))


CONVERGENCE = Study(
    name="convergence",
    question="Up to which staleness bound does training converge as synchronous training does?",
    script=measure_convergence,
)
