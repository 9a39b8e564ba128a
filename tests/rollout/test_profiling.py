"""Profiling: every load is measured in turn, and the constants of a known engine come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from staleflow.coordination.cost_model import CostModel, fit_cost_model, step_error
from staleflow.errors import UserError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine
from staleflow.rollout.profiling import STEPS, ProfileLoad, plan_loads, profile
from staleflow.rollout.scripted_lengths import fixed
from staleflow.rollout.torch import TorchEngine

COSTS = CostModel(k1=3e-6, k2=5e-3, k3=1e-3, k4=1e-3, prefill=4e-5, pull=0.25)


class Clock:
    """Seconds that an engine spends; `disturbed` is called with how many steps came before."""

    def __init__(self, disturbed: Callable[[int], float] = lambda spent: 1.0) -> None:
        self.now = 0.0
        self.spent = 0
        self._disturbed = disturbed

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * self._disturbed(self.spent)
        self.spent += 1


def fake(clock: Clock, costs: CostModel | float = COSTS, tokens: int = 10**6, most: int = 24) -> FakeEngine:
    return FakeEngine(
        sampling=SamplingParams(max_model_len=200),
        seed=0,
        kv_capacity_tokens=2048,
        max_running=most,
        lengths=fixed(tokens),
        seconds_per_step=costs,
        spend=clock.spend,
    )


LOADS = plan_loads(max_running=24, kv_capacity=2048, max_model_len=200)


def measure(engine: Any, clock: Callable[[], float], **more: Any) -> Any:
    return profile(engine, LOADS, weights={}, clock=clock, vocab_size=16, **more)


def test_a_plan_spans_what_the_engine_holds_and_holds_a_third_out() -> None:
    counts = {len(load.lengths) for load in LOADS}
    assert (min(counts), max(counts)) == (1, 24)
    assert len(counts) == 8  # 1, 1.5 and 2.2 of the nine in equal ratios make 1 and 2
    for load in LOADS:
        assert sum(length + STEPS + 2 for length in load.lengths) <= 2048
        assert max(load.lengths) + STEPS + 1 < 200
        assert len(set(load.lengths)) > 1 if load.spread else len(set(load.lengths)) == 1
    assert sum(load.held_out for load in LOADS) / len(LOADS) == pytest.approx(1 / 3, abs=0.02)
    for held_out in (False, True):
        kinds = {load.spread for load in LOADS if load.held_out is held_out}
        assert kinds == {False, True}


def test_an_engine_too_small_to_vary_anything_is_refused() -> None:
    with pytest.raises(UserError, match="too small to profile"):
        plan_loads(max_running=1, kv_capacity=8192, max_model_len=512)
    with pytest.raises(UserError, match="contexts of 20 tokens is too small"):
        plan_loads(max_running=64, kv_capacity=8192, max_model_len=20)


def test_the_constants_of_a_known_engine_come_back() -> None:
    clock = Clock()
    measured = measure(fake(clock), clock, repeats=2)
    found = fit_cost_model(measured.steps(held_out=False), measured.prefills(held_out=False), measured.pull_s)
    assert astuple(found)[:4] == pytest.approx(astuple(COSTS)[:4], rel=1e-6)
    assert found.pull == pytest.approx(COSTS.pull)
    # The step in which they join also decodes: a little less than the first timed one.
    assert found.prefill == pytest.approx(COSTS.prefill, rel=0.05)
    assert step_error(found, measured.steps(held_out=True)).max < 1e-6
    assert measured.disturbance == pytest.approx(0, abs=0.1)


def test_every_load_is_measured_in_every_repeat() -> None:
    clock, calls = Clock(), []
    measured = measure(fake(clock), clock, repeats=3, progress=lambda: calls.append(clock.now))
    assert len(measured.loads) == len(LOADS)
    assert len(calls) == 3 * len(LOADS)
    assert [load.step.running for load in measured.loads] == [len(load.lengths) for load in LOADS]


def test_a_machine_that_is_busy_half_of_the_time_does_not_show_in_the_constants() -> None:
    clock = Clock(lambda spent: 1.0 if spent % 5 < 2 else 7.0)
    measured = measure(fake(clock), clock, repeats=2)
    found = fit_cost_model(measured.steps(held_out=False))
    assert astuple(found)[:4] == pytest.approx(astuple(COSTS)[:4], rel=1e-6)
    assert measured.disturbance > 1


def test_a_drift_of_the_machine_favours_no_load() -> None:
    """Twice as slow at the end as at the start: forwards and backwards, all see the same mean."""
    clock = Clock(lambda spent: 1 + spent / 2000)
    measured = measure(fake(clock), clock, repeats=4)
    usual = [load.usual_s / COSTS.step_s(load.step.running, load.step.kv_tokens) for load in measured.loads]
    assert max(usual) / min(usual) < 1.15


def test_an_engine_that_takes_no_time_has_no_costs() -> None:
    clock = Clock()
    with pytest.raises(UserError, match="takes no time"):
        measure(fake(clock, 0.0), clock)


def test_an_engine_that_ends_trajectories_or_cannot_hold_them_is_refused() -> None:
    clock = Clock()
    with pytest.raises(UserError, match="so it cannot be profiled"):
        measure(fake(clock, tokens=3), clock)
    clock = Clock()
    with pytest.raises(UserError, match="so it cannot be profiled"):
        measure(fake(clock, most=8), clock)


def test_the_torch_engine_can_be_profiled(new_engine: Any) -> None:
    ticks = iter(range(10**6))
    engine: TorchEngine = new_engine(max_running=4, kv_capacity_tokens=200)
    loads = [
        ProfileLoad(lengths=(5,), spread=False, held_out=False),
        ProfileLoad(lengths=(3, 9, 20, 31), spread=True, held_out=True),
    ]
    weights = {k: v.numpy().copy() for k, v in engine._model.state_dict().items()}
    measured = profile(
        engine, loads, weights=weights, clock=lambda: float(next(ticks)), vocab_size=19, repeats=1
    )
    assert [load.step.running for load in measured.loads] == [1, 4]
    # Before the first timed step each has gained the token of the step in which it joined.
    assert [load.step.kv_tokens for load in measured.loads] == [6, 67]
    assert engine.trajectories() == {}
