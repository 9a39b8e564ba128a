"""The search for a layout: what it considers, what it leaves out, what it chooses, what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from staleflow.config import Config, load_config
from staleflow.errors import UserError
from staleflow.simulation.bounds import Bounds
from staleflow.simulation.hardware import cluster_settings
from staleflow.simulation.planning import (
    Candidate,
    Layout,
    Outcome,
    choose,
    find_candidates,
    outcome_of,
    search,
    simulated_steps,
    whole_rounds,
    with_layout,
)
from staleflow.simulation.result import InstanceRow, SimulationResult, StepRow

LARGE = [
    "data.batch_size=4",
    "data.group_size=4",
    "rollout.max_new_tokens=20480",
    "rollout.max_running=256",
    "rollout.kv_capacity_tokens=32768",
    "training.micro_batch_tokens=32768",
    "simulation.prompt_tokens=2048",
]


def config(*overrides: str) -> Config:
    return load_config([], [*LARGE, *overrides])


def candidate(
    rollout: int, bound: int, rate: float, *, slack: float = 1000.0, pull_s: float = 0.0
) -> Candidate:
    """One whose trainer binds at `rate` tokens a second."""
    return Candidate(
        layout=Layout(rollout_gpus=rollout, tensor_parallel=1, training_gpus=8, bound=bound),
        instances=rollout,
        kv_capacity=100_000,
        bounds=Bounds(
            rollout=rate * slack, trainer=rate, latency=rate * slack, best_running=4, step_tokens=100.0
        ),
        pull_s=pull_s,
    )


def outcome(rate: float) -> Outcome:
    return Outcome(
        tokens_per_s=rate,
        step_s=1.0,
        staleness_mean=0.0,
        staleness_max=0,
        trainer_idle=0.0,
        instances_idle=0.0,
    )


class Reaching:
    """Simulations that reach a share of the bound; `rounds` are the layouts asked for."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.rounds: list[list[int]] = []

    def __call__(self, chosen: Sequence[Candidate]) -> list[Outcome]:
        self.rounds.append([c.layout.rollout_gpus for c in chosen])
        return [outcome(self.share * c.bounds.least) for c in chosen]


# ---------------------------------------------------------------------- candidates


def test_every_split_that_fits_is_a_candidate() -> None:
    """Of 12 GPUs 4 have to train; a 14B model fits instances of 1, 2, 4 and 8."""
    layouts = [c.layout for c in find_candidates(config(), 12, [2])]
    splits = {t: [x.rollout_gpus for x in layouts if x.tensor_parallel == t] for t in (1, 2, 4, 8)}
    assert splits == {1: [1, 2, 3, 4, 5, 6, 7, 8], 2: [2, 4, 6, 8], 4: [4, 8], 8: [8]}
    assert all(x.rollout_gpus + x.training_gpus == 12 and x.bound == 2 for x in layouts)


def test_many_gpus_are_divided_in_nodes() -> None:
    layouts = [c.layout for c in find_candidates(config(), 256, [1])]
    assert {x.rollout_gpus for x in layouts} == set(range(8, 256, 8))


def test_instances_that_are_too_small_for_the_model_are_left_out() -> None:
    candidates = find_candidates(config("simulation.model=qwen2.5-32b", "simulation.gpu=A100"), 32, [1])
    assert min(c.layout.tensor_parallel for c in candidates) == 1
    kv = "simulation.efficiency.kv_memory=0.85"
    candidates = find_candidates(config("simulation.model=qwen2.5-32b", "simulation.gpu=A100", kv), 32, [1])
    assert min(c.layout.tensor_parallel for c in candidates) == 2


def test_more_staleness_raises_the_latency_bound_alone() -> None:
    by_bound = {c.layout.bound: c for c in find_candidates(config(), 5, [1, 3])}
    one, three = by_bound[1].bounds, by_bound[3].bounds
    assert three.latency == pytest.approx(2 * one.latency)
    assert (three.rollout, three.trainer) == (one.rollout, one.trainer)


def test_policy_sync_has_nothing_to_divide_and_no_staleness() -> None:
    candidates = find_candidates(config("coordination.policy=sync"), 16, [1, 2, 3])
    assert [(c.layout.tensor_parallel, c.layout.bound, c.instances) for c in candidates] == [
        (1, 0, 16),
        (2, 0, 8),
        (4, 0, 4),
        (8, 0, 2),
    ]


def test_a_plan_is_for_a_cluster_on_which_nothing_dies() -> None:
    ill = config("simulation.outages=[{at: 1.0, instance: 15}]")
    planned = with_layout(ill, Layout(rollout_gpus=2, tensor_parallel=2, training_gpus=6, bound=3))
    assert planned.simulation.outages == ()
    assert (planned.simulation.rollout_gpus, planned.staleness.bound) == (2, 3)


def test_too_few_gpus_are_refused_with_the_sum() -> None:
    with pytest.raises(UserError) as caught:
        find_candidates(config(), 4, [1])
    said = str(caught.value)
    assert said.startswith("4 H20 are too few for qwen2.5-14b: training takes at least 4 (")
    assert "14.8 billion parameters x 16 bytes = 236 GB on GPUs of 96 GB x 0.8 (training_memory)" in said
    assert said.endswith("together 5")


def test_a_response_that_no_instance_holds_is_refused_with_the_sum() -> None:
    huge = ["rollout.max_new_tokens=5000000", "rollout.kv_capacity_tokens=5100000"]
    with pytest.raises(UserError, match="no number of GPUs of one node is enough"):
        find_candidates(config(*huge, "training.micro_batch_tokens=5100000"), 64, [1])


def test_measured_costs_cannot_be_planned_with() -> None:
    stated = [f"simulation.training.{key}=1.0" for key in ("fixed_s", "token_s", "push_s")]
    with pytest.raises(UserError, match=r"cannot use the costs in simulation\.costs 'c\.json'"):
        find_candidates(config("simulation.costs=c.json", *stated), 16, [1])


# ---------------------------------------------------------------------- search


def test_the_most_promising_are_simulated_first_until_none_can_win() -> None:
    """Of 100, 90, 80, 70 at 85 %: the first reaches 85, so that 80 and 70 cannot win."""
    simulate = Reaching(0.85)
    candidates = [candidate(n, 1, rate) for n, rate in enumerate((70.0, 100.0, 80.0, 90.0))]
    outcomes = search(candidates, simulate, budget=10, at_once=1)
    assert simulate.rounds == [[1], [3]]
    assert len(outcomes) == 2


def test_the_budget_is_kept_and_shared_by_the_bounds_on_staleness() -> None:
    simulate = Reaching(0.1)
    candidates = [candidate(10 * bound + n, bound, 100.0 - n) for bound in (1, 2, 3) for n in range(4)]
    search(candidates, simulate, budget=5, at_once=2)
    assert simulate.rounds == [[10, 20], [30, 11], [21]]


def test_the_bound_of_one_staleness_rules_out_nothing_of_another() -> None:
    simulate = Reaching(0.9)
    search([candidate(1, 1, 50.0), candidate(2, 2, 100.0)], simulate, budget=10, at_once=1)
    assert simulate.rounds == [[1], [2]]


def test_a_side_that_is_nearly_as_slow_makes_a_candidate_less_promising() -> None:
    """Two equal sides: 2^(-1/4) = 0.84 of either."""
    even, uneven = candidate(1, 1, 100.0, slack=1.0), candidate(2, 1, 95.0)
    assert even.promise == pytest.approx(100 * 3**-0.25)
    assert uneven.promise == pytest.approx(95.0)
    assert uneven.rank < even.rank


def test_a_side_that_pulls_slow_down_makes_a_candidate_less_promising() -> None:
    """Steps of 100 tokens at 100 tokens/s take 1 s: one pull of 1 s in η + 1 = 4 steps makes that 1.25 s."""
    free, dear = candidate(1, 3, 100.0, slack=1.0), candidate(2, 3, 100.0, slack=1.0, pull_s=1.0)
    assert dear.promise == pytest.approx((80.0**-4 + 2 * 100.0**-4) ** -0.25)
    assert free.rank < dear.rank
    assert candidate(2, 0, 100.0, slack=1.0, pull_s=1.0).promise < dear.promise
    assert dear.bounds == free.bounds


def test_a_pull_costs_the_transfer_and_half_the_kv_where_it_is_rebuilt() -> None:
    def pull_s(*overrides: str) -> float:
        return find_candidates(config(*overrides), 5, [1])[0].pull_s

    transfer = 14_770_033_664 * 2 / (50e9 * 0.8)
    assert pull_s("rollout.on_pull=keep_kv", "simulation.latencies.pull_s=0") == pytest.approx(transfer)
    assert pull_s("coordination.policy=sync", "simulation.latencies.pull_s=0.5") == pytest.approx(
        transfer + 0.5
    )
    full = cluster_settings(config("simulation.rollout_gpus=1", "simulation.training_gpus=4"))
    rebuilt = full.kv_capacity / 2 * full.costs.prefill
    assert rebuilt > 30
    assert pull_s() == pytest.approx(full.costs.pull + rebuilt)


def test_another_split_comes_before_another_size_of_instances() -> None:
    """Of 100 and 99.5 with one split, the second counts 98.5: 99 of another split comes between them."""
    first, last, between = candidate(1, 1, 100.0), candidate(1, 1, 99.5), candidate(2, 1, 99.0)
    last = dataclasses.replace(last, layout=dataclasses.replace(last.layout, tensor_parallel=2))
    simulate = Reaching(0.1)
    search([last, between, first], simulate, budget=3, at_once=3)
    assert simulate.rounds == [[1, 2, 1]]


def test_the_smallest_staleness_that_is_enough_is_chosen() -> None:
    def layout(rollout: int, bound: int) -> Layout:
        return candidate(rollout, bound, 1.0).layout

    outcomes = {
        layout(1, 1): outcome(90.0),
        layout(1, 2): outcome(97.5),
        layout(2, 2): outcome(98.0),
        layout(1, 3): outcome(100.0),
    }
    assert choose(outcomes) == layout(2, 2)
    assert choose({**outcomes, layout(9, 3): outcome(120.0)}) == layout(9, 3)


# ---------------------------------------------------------------------- outcomes


def step(number: int, *, seconds: float, waited: float, tokens: int, staleness: float) -> StepRow:
    return StepRow(
        step=number,
        began=0.0,
        ended=seconds,
        waited=waited,
        tokens=tokens,
        trajectories=4,
        staleness_mean=staleness,
        staleness_max=number,
    )


RESULT = SimulationResult(
    reason="time",
    seconds=100.0,
    steps=(
        step(0, seconds=50.0, waited=40.0, tokens=10, staleness=0.0),
        step(1, seconds=60.0, waited=0.0, tokens=10, staleness=1.0),
        step(2, seconds=70.0, waited=4.0, tokens=100, staleness=1.0),
        step(3, seconds=90.0, waited=1.0, tokens=200, staleness=0.0),
    ),
    instances=(
        InstanceRow(
            instance="i",
            up=100.0,
            busy=70.0,
            prefill=0.0,
            pulling=10.0,
            generated=1,
            pulls=0,
            preemptions=0,
            running_mean=1.0,
        ),
    ),
    tokens={},
    staleness={},
    commands={},
    rejections=0,
    cycles=0,
    finished=0,
    prefilled=0,
    resampled=0,
    truncated=0,
)


def test_an_outcome_leaves_the_beginning_out_and_counts_whole_rounds() -> None:
    """η = 0: steps 2 and 3, from the end of step 1 at 60 s to 90 s."""
    seen = outcome_of(RESULT, 0)
    assert seen.tokens_per_s == pytest.approx(300 / 30)
    assert seen.step_s == pytest.approx(15.0)
    assert (seen.staleness_mean, seen.staleness_max) == (0.5, 3)
    assert seen.trainer_idle == pytest.approx(5 / 30)
    assert seen.instances_idle == pytest.approx(0.2)


def test_a_part_of_a_round_is_not_counted() -> None:
    """η = 1: steps 3 and 4 after a beginning of 3, from 70 s to 100 s; half a round is left."""
    more = (
        step(4, seconds=100.0, waited=0.0, tokens=100, staleness=1.0),
        step(5, seconds=101.0, waited=0.0, tokens=9999, staleness=1.0),
    )
    seen = outcome_of(dataclasses.replace(RESULT, steps=(*RESULT.steps, *more)), 1)
    assert seen.tokens_per_s == pytest.approx(300 / 30)


def test_a_run_without_a_whole_round_counts_as_a_whole() -> None:
    assert outcome_of(RESULT, 3).tokens_per_s == pytest.approx(320 / 90)


@pytest.mark.parametrize(("bound", "steps"), [(0, 2 + 4), (1, 3 + 4), (2, 4 + 6), (3, 5 + 4), (5, 7 + 6)])
def test_a_candidate_is_simulated_for_its_beginning_and_whole_rounds(bound: int, steps: int) -> None:
    assert simulated_steps(candidate(1, bound, 100.0)) == steps


@pytest.mark.parametrize(("steps", "bound", "whole"), [(4, 0, 4), (3, 1, 4), (4, 2, 6), (4, 3, 4), (5, 3, 8)])
def test_steps_are_measured_in_whole_rounds_of_the_bound(steps: int, bound: int, whole: int) -> None:
    assert whole_rounds(steps, bound) == whole


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(UserError, match="no step was trained within 100 simulated seconds"):
        outcome_of(dataclasses.replace(RESULT, steps=()), 1)


def test_bounds_hold_for_what_is_simulated() -> None:
    """The command's own simulation of every layout of 6 GPUs: none is above its bound by more than noise."""
    from staleflow.cli.plan import simulate_candidate

    small = config("rollout.max_new_tokens=2048", "simulation.prompt_tokens=512")
    candidates = find_candidates(small, 6, [1])
    reached = [simulate_candidate(small, one).tokens_per_s for one in candidates]
    for rate, one in zip(reached, candidates, strict=True):
        assert 0 < rate <= 1.1 * one.bounds.least
    assert simulate_candidate(small, candidates[0]).tokens_per_s == reached[0]
