"""Trajectories driven at random between two engines end as if nobody had touched them (F8, F33)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staleflow.data.trajectory import Trajectory
from staleflow.rollout.batching import BatchingEngine
from staleflow.rollout.scripted_lengths import long_tailed

Build = Callable[..., Any]


def walk(
    rng: random.Random, engines: list[BatchingEngine], initial: list[Trajectory]
) -> dict[str, Trajectory]:
    """Route, step, interrupt and pull at random until all have finished."""
    pending = list(initial)
    finished: dict[str, Trajectory] = {}
    for _ in range(5000):
        engine = rng.choice(engines)
        match rng.choices(["route", "step", "interrupt", "pull"], weights=[3, 8, 1, 0.3])[0]:
            case "route" if pending:
                engine.add(pending.pop(rng.randrange(len(pending))))
            case "step":
                finished.update((t.trajectory_id, t) for t in engine.step())
            case "interrupt" if engine.trajectories():
                held = sorted(engine.trajectories())
                pending += engine.interrupt(rng.sample(held, rng.randint(1, len(held))))
            case "pull":
                engine.load_weights(new_weights(engine), engine.version, rng.choice(["recompute", "keep_kv"]))
        for e in engines:
            load = e.load()
            assert load.kv_tokens <= load.kv_capacity
            assert load.running + load.waiting == len(e.trajectories())
        assert len(pending) + sum(len(e.trajectories()) for e in engines) + len(finished) == len(initial)
        if len(finished) == len(initial):
            return finished
    raise AssertionError(f"only {sorted(finished)} finished")


def new_weights(engine: BatchingEngine) -> dict[str, np.ndarray]:
    """The same weights again, so that samples must not change; the fake engine looks at none."""
    model = getattr(engine, "_model", None)
    return {} if model is None else {n: t.detach().numpy().copy() for n, t in model.state_dict().items()}


def assert_as_if_undisturbed(
    walked: dict[str, Trajectory], reference: BatchingEngine, initial: list[Trajectory]
) -> None:
    for trajectory in initial:
        reference.add(trajectory)
    expected: dict[str, Trajectory] = {}
    while reference.trajectories():
        expected.update((t.trajectory_id, t) for t in reference.step())
    for name, trajectory in expected.items():
        assert walked[name].tokens.tolist() == trajectory.tokens.tolist()
        np.testing.assert_allclose(walked[name].log_probs, trajectory.log_probs, atol=1e-4)
        assert walked[name].finish_reason == trajectory.finish_reason
        assert len(walked[name].versions) == len(walked[name].loss_mask) == trajectory.response_len


@pytest.mark.parametrize("seed", range(20))
def test_fake_engine(seed: int, new_fake: Build, new_trajectory: Build) -> None:
    lengths = long_tailed(8, 0.8, 30, seed=seed)
    initial = [new_trajectory(f"t{i}", 1 + i % 7, max_new_tokens=20) for i in range(12)]
    engines = [new_fake(lengths=lengths, kv_capacity_tokens=60, max_running=4 + i) for i in range(2)]
    walked = walk(random.Random(seed), engines, initial)
    assert_as_if_undisturbed(walked, new_fake(lengths=lengths), initial)


@pytest.mark.parametrize("seed", range(3))
def test_torch_engine(seed: int, new_engine: Build, new_trajectory: Build) -> None:
    initial = [new_trajectory(f"t{i}", 1 + 3 * i % 11, max_new_tokens=5 + 2 * i) for i in range(8)]
    engines = [new_engine(kv_capacity_tokens=70, max_running=3 + i, prefill_chunk_tokens=9) for i in range(2)]
    walked = walk(random.Random(seed), engines, initial)
    assert_as_if_undisturbed(walked, new_engine(), initial)
