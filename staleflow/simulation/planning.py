"""Searches for the best use of a number of GPUs: split, GPUs per instance, staleness bound.

::

    layouts ──bounds──> candidates, most promising first ──short simulations, in rounds──> outcomes ──> choice

Invariants: a candidate whose bound is below the simulated throughput of another one at the same η cannot win
and is never simulated; each η gets the same number of simulations; the same config and options give the same
plan.

The choice is the best outcome at the smallest η that reaches `ENOUGH` of the overall best: staleness without
a gain in throughput is not worthwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from staleflow.config.schema import Config
from staleflow.coordination.policies import effective_bound
from staleflow.errors import UserError
from staleflow.simulation.bounds import Bounds, draw_batches, find_bounds
from staleflow.simulation.hardware import (
    Context,
    check_capacity,
    cluster_settings,
    find_context,
    find_roofline,
    read_lengths,
)
from staleflow.simulation.result import SimulationResult
from staleflow.simulation.roofline import Roofline
from staleflow.simulation.settings import ClusterSettings

ENOUGH = 0.95
"""Share of the best throughput that a smaller η must reach to be chosen: a few percent are within the noise
of a short run, and do not justify one more version of staleness."""
SAME_SPLIT = 0.99
"""Factor on the promise of a layout for each earlier one with the same split, when ordering candidates."""
MEASURED_STEPS = 4
"""Minimum of steps that a candidate is simulated for after its beginning, rounded up to rounds of η + 1."""
PATIENCE = 20.0
"""A candidate's simulation ends after this multiple of the shortest possible time of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One use of the GPUs."""

    rollout_gpus: int
    tensor_parallel: int
    training_gpus: int
    bound: int
    """η."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that fits the memory, and its upper bounds."""

    layout: Layout
    instances: int
    kv_capacity: int
    bounds: Bounds
    pull_s: float = 0.0
    """Expected seconds that an instance loses to a pull."""

    @property
    def promise(self) -> float:
        """Expected tokens per second: a smooth minimum of its bounds.

        The bounds ignore pulls, so their time is added: tokens are trained on within η + 1 steps of the
        weights that made them, so each instance pulls at least once in η + 1 steps.

        Equally fast sides sometimes wait for each other, so a layout whose bounds are close to each other
        stays further below them; (a^-4 + b^-4)^(-1/4) of two equal bounds is 84 % of either.
        """
        bounds = self.bounds
        period = bounds.seconds("rollout") + self.pull_s / (self.layout.bound + 1)
        rates = (bounds.step_tokens / period, bounds.trainer, bounds.latency)
        return float(sum(rate**-4.0 for rate in rates) ** -0.25)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: smallest for the most promising."""
        return (-self.promise, self.layout.tensor_parallel, self.layout.rollout_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a candidate's short simulation, without its beginning."""

    tokens_per_s: float
    """Generated tokens trained on."""
    step_s: float
    staleness_mean: float
    staleness_max: int
    trainer_idle: float
    """Share of the time that it waited for a batch."""
    instances_idle: float
    """Share of the time, beginning included, that an instance neither decoded nor pulled."""


Simulate = Callable[[Sequence[Candidate]], Sequence[Outcome]]
"""Simulates several candidates, in parallel if possible, and returns their outcomes in the same order."""
Outcomes = Mapping[Layout, Outcome]


def with_layout(config: Config, layout: Layout) -> Config:
    """The config of a layout, without outages and slowdowns."""
    changes = {
        "rollout_gpus": layout.rollout_gpus,
        "tensor_parallel": layout.tensor_parallel,
        "training_gpus": layout.training_gpus,
        "outages": (),
        "slowdowns": (),
    }
    return config.model_copy(
        update={
            "simulation": config.simulation.model_copy(update=changes),
            "staleness": config.staleness.model_copy(update={"bound": layout.bound}),
        }
    )


# ---------------------------------------------------------------------- candidates


def find_candidates(config: Config, gpus: int, bounds: Sequence[int]) -> list[Candidate]:
    """All layouts of `gpus` GPUs that fit their memory, for each η of `bounds`.

    Raises UserError, with the arithmetic, if there is none.
    """
    if config.simulation.costs is not None:
        raise UserError(
            "a plan computes costs from model and GPUs, so it cannot use the costs in simulation.costs "
            f"{config.simulation.costs!r}: leave that key out"
        )
    layouts = _layouts(config, find_roofline(config), gpus, sorted(set(bounds)))
    lengths = read_lengths(config)
    context = find_context(config, lengths)
    drawn: list[list[int]] | None = None
    candidates = []
    for layout in layouts:
        cluster = cluster_settings(with_layout(config, layout), lengths=lengths, context=context)
        drawn = drawn or draw_batches(cluster, batch_size=config.data.batch_size, batches=8)
        candidates.append(
            Candidate(
                layout=layout,
                instances=cluster.instances,
                kv_capacity=cluster.kv_capacity,
                bounds=find_bounds(
                    cluster, bound=layout.bound, batch_size=config.data.batch_size, drawn=drawn
                ),
                pull_s=_pull_s(config, cluster, context),
            )
        )
    return candidates


def _pull_s(config: Config, cluster: ClusterSettings, context: Context) -> float:
    """Seconds of a pull by an instance at half load, since it is seldom full when a pull pays; at a barrier
    it is empty.
    """
    rebuilt = min(cluster.kv_capacity, cluster.max_running * context.held) / 2
    if cluster.on_pull == "keep_kv" or config.coordination.policy in ("sync", "one_step"):
        rebuilt = 0.0
    return cluster.costs.pull + cluster.costs.prefill_s(rebuilt)


def _layouts(config: Config, roofline: Roofline, gpus: int, bounds: Sequence[int]) -> list[Layout]:
    policy = config.coordination.policy
    if policy == "one_step" and 0 in bounds:
        raise UserError(
            "one_step generates one step ahead of training, which η = 0 forbids: plan it with η = 1"
        )
    bounds = sorted({effective_bound(policy, bound) for bound in bounds})
    parallels = [t for t in roofline.parallels() if _fits(config, roofline, t)]
    if not parallels:
        check_capacity(config, roofline, max(roofline.parallels()))  # raises, with the arithmetic
    colocated = policy == "sync"
    training = roofline.least_training_gpus()
    least = max(training, parallels[0]) if colocated else training + parallels[0]
    if gpus < least:
        raise UserError(
            f"{gpus} {roofline.gpu.name} are too few for {roofline.model.name}: training takes at least "
            f"{training} ({roofline.training_sum()}) and an instance at least {parallels[0]} "
            f"({roofline.memory_sum(parallels[0])}), {'one after the other' if colocated else 'together'} "
            f"{least}"
        )
    return [
        Layout(rollout_gpus=rollout, tensor_parallel=t, training_gpus=gpus - rollout, bound=bound)
        for t in parallels
        for rollout in _rollout_gpus(gpus, t, training, colocated=colocated)
        for bound in bounds
    ]


def _fits(config: Config, roofline: Roofline, parallel: int) -> bool:
    try:
        check_capacity(config, roofline, parallel)
    except UserError:
        return False
    return True


def _rollout_gpus(gpus: int, parallel: int, training: int, *, colocated: bool) -> list[int]:
    """Numbers of rollout GPUs to try: about 16 multiples of an instance's GPUs, in whole nodes if there are
    many GPUs. At least `training` GPUs are left for training.
    """
    if colocated:  # all GPUs generate and all train, so the split does not matter
        return [] if gpus % parallel or gpus == parallel else [parallel]
    unit = math.lcm(parallel, min(8, 2 ** int(math.log2(max(1, gpus // 32)))))
    splits = [n for n in range(unit, gpus, unit) if gpus - n >= training]
    return splits or [n for n in range(parallel, gpus, parallel) if gpus - n >= training]


# ---------------------------------------------------------------------- the search


def search(candidates: Sequence[Candidate], simulate: Simulate, *, budget: int, at_once: int) -> Outcomes:
    """Simulate up to `budget` of the candidates that can still win, `at_once` in a round."""
    waiting: dict[int, list[Candidate]] = {}
    for candidate in _in_order(candidates):
        waiting.setdefault(candidate.layout.bound, []).append(candidate)
    outcomes: dict[Layout, Outcome] = {}
    simulated = dict.fromkeys(waiting, 0)
    while len(outcomes) < budget:
        _drop_hopeless(waiting, outcomes)
        chosen: list[Candidate] = []
        while len(chosen) < min(at_once, budget - len(outcomes)) and any(waiting.values()):
            bound = min((b for b in waiting if waiting[b]), key=lambda b: (simulated[b], b))
            chosen.append(waiting[bound].pop(0))
            simulated[bound] += 1
        if not chosen:
            break
        for candidate, outcome in zip(chosen, simulate(chosen), strict=True):
            outcomes[candidate.layout] = outcome
    return outcomes


def _in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Most promising first, where each further candidate of the same split counts less.

    The GPUs of an instance matter little compared with the split, so the few simulations go to different
    splits.
    """
    before: Counter[tuple[int, int]] = Counter()
    order: list[tuple[tuple[float, ...], Candidate]] = []
    for candidate in sorted(candidates, key=lambda c: c.rank):
        split = (candidate.layout.bound, candidate.layout.rollout_gpus)
        promise, *rest = candidate.rank
        order.append(((promise * SAME_SPLIT ** before[split], *rest), candidate))
        before[split] += 1
    return [candidate for _, candidate in sorted(order, key=lambda pair: pair[0])]


def _drop_hopeless(waiting: dict[int, list[Candidate]], outcomes: Outcomes) -> None:
    for bound, candidates in waiting.items():
        reached = [o.tokens_per_s for layout, o in outcomes.items() if layout.bound == bound]
        if reached:
            waiting[bound] = [c for c in candidates if c.bounds.least > max(reached)]


def choose(outcomes: Outcomes) -> Layout:
    """The best layout at the smallest η that is `ENOUGH`."""
    most = max(outcome.tokens_per_s for outcome in outcomes.values())
    enough = {layout: o for layout, o in outcomes.items() if o.tokens_per_s >= ENOUGH * most}
    smallest = min(layout.bound for layout in enough)
    best = [layout for layout in enough if layout.bound == smallest]
    return max(best, key=lambda layout: enough[layout].tokens_per_s)


# ---------------------------------------------------------------------- one candidate


def whole_rounds(steps: int, bound: int) -> int:
    """`steps`, rounded up to a multiple of η + 1.

    Buffers are empty at the start, so batches arrive in bursts of η + 1, possibly for a long time. Measuring
    part of a burst would overestimate or underestimate the throughput.
    """
    return -(-steps // (bound + 1)) * (bound + 1)


def beginning(bound: int) -> int:
    """Steps during which the cluster fills up, excluded from the measurement."""
    return bound + 2


def simulated_steps(candidate: Candidate) -> int:
    """Number of steps to simulate: the beginning and the measured ones."""
    bound = candidate.layout.bound
    return beginning(bound) + whole_rounds(MEASURED_STEPS, bound)


def most_seconds(candidate: Candidate) -> float:
    """Limit on the simulated seconds of a candidate."""
    return PATIENCE * simulated_steps(candidate) * candidate.bounds.seconds()


def outcome_of(result: SimulationResult, bound: int) -> Outcome:
    """Outcome of the steps after the beginning, in whole rounds of η + 1.

    Without a whole round, all steps count. Raises UserError if there was no step at all.
    """
    if not result.steps:
        raise UserError(
            f"no step was trained within {result.seconds:,.0f} simulated seconds, so nothing can be planned: "
            "the longest responses take too long for this policy"
        )
    skip, steps = beginning(bound), result.steps
    rounds = (len(steps) - skip) // (bound + 1)
    if rounds > 0:
        steps = steps[: skip + rounds * (bound + 1)]
    else:
        skip = 0
    rows = steps[skip:]
    seconds = rows[-1].ended - (steps[skip - 1].ended if skip else 0.0)
    trajectories = sum(row.trajectories for row in rows)
    return Outcome(
        tokens_per_s=sum(row.tokens for row in rows) / seconds,
        step_s=seconds / len(rows),
        staleness_mean=sum(row.staleness_mean * row.trajectories for row in rows) / trajectories,
        staleness_max=max(row.staleness_max for row in rows),
        trainer_idle=sum(row.waited for row in rows) / seconds,
        instances_idle=result.instances_idle_share,
    )
