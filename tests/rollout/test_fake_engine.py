"""The fake engine: its formulas, its script, and the rules that it shares with the torch engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from staleflow.coordination.cost_model import CostModel
from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeScript, fake_log_prob, fake_token
from staleflow.rollout.scripted_lengths import evenly, fixed, long_tailed, turn_start

Build = Callable[..., Any]


def test_tokens_and_log_probs_are_the_documented_functions(
    new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    engine = new_fake(version=3, vocab_size=5, lengths=fixed(6))
    engine.add(new_trajectory("t"))
    t = drain(engine)["t"]
    assert t.tokens.tolist() == [fake_token(7, "t", p, [1, 2, 3, 4]) for p in range(5)] + [0]
    expected = np.array([fake_log_prob(7, "t", p, 3, 3) for p in range(6)], dtype=np.float32)
    np.testing.assert_array_equal(t.log_probs, expected)
    assert t.versions.tolist() == [3] * 6
    assert t.finish_reason is FinishReason.STOP


def test_a_greedy_trajectory_has_the_first_token_that_does_not_stop(
    new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    engine = new_fake(lengths=fixed(4))
    engine.add(new_trajectory("t"), greedy=True)
    assert drain(engine)["t"].tokens.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("k", range(9))
def test_interrupt_and_resume_at_every_k_changes_nothing(
    k: int, new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    """F8, F33. The scripted length is 8, the stop token included."""
    whole = new_fake()
    whole.add(new_trajectory("t"))
    expected = drain(whole)["t"]
    first, second = new_fake(), new_fake(max_running=1)
    first.add(new_trajectory("t"))
    finished = [t for _ in range(k) for t in first.step()]
    if k < 8:
        (half,) = first.interrupt(["t"])
        assert (half.response_len, half.finish_reason) == (k, None)
        second.add(half)
        finished = [drain(second)["t"]]
    for name in ("tokens", "log_probs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(finished[0], name), getattr(expected, name))
    assert finished[0].finish_reason is FinishReason.STOP


def test_the_budget_ends_what_the_script_would_not(
    new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    """F9."""
    engine = new_fake(lengths=fixed(100))
    engine.add(new_trajectory("t", max_new_tokens=16))
    for _ in range(10):
        engine.step()
    (half,) = engine.interrupt(["t"])
    assert half.remaining_tokens == 6
    engine.add(half)
    t = drain(engine)["t"]
    assert (t.response_len, t.finish_reason) == (16, FinishReason.LENGTH)
    engine.add(t.finished(None))
    (same,) = engine.step()
    assert (same.response_len, same.finish_reason) == (16, FinishReason.LENGTH)


def test_kv_budget_is_the_torch_engines(
    new_fake: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    """One scheduler: with equal lengths both engines admit and preempt alike, step by step."""
    engines = [
        new_fake(sampling=SamplingParams(), lengths=fixed(100), kv_capacity_tokens=40, max_running=5),
        new_engine(kv_capacity_tokens=40, max_running=5),
    ]
    loads: list[list[Any]] = [[], []]
    for engine, seen in zip(engines, loads, strict=True):
        for i in range(7):
            engine.add(new_trajectory(f"t{i}", 2 + i, max_new_tokens=15))
        while engine.trajectories():
            engine.step()
            seen.append(engine.load())
    assert loads[0] == loads[1]
    assert loads[0][-1].preemptions > 0


@pytest.mark.parametrize(("on_pull", "kv_version"), [("recompute", 4), ("keep_kv", 1)])
def test_log_probs_tell_the_weights_that_filled_the_kv(
    on_pull: str, kv_version: int, new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    """F12: after a pull, a new prompt uses new KV in either mode; a running one as configured."""
    engine = new_fake(version=1)
    engine.add(new_trajectory("running", 5))
    for _ in range(3):
        engine.step()
    engine.load_weights({}, 4, on_pull)
    engine.add(new_trajectory("new", 5))
    finished = drain(engine)
    for name, start, kv in (("running", 3, kv_version), ("new", 0, 4)):
        expected = [np.float32(fake_log_prob(7, name, p, 4, kv)) for p in range(start, 8)]
        assert finished[name].log_probs[start:].tolist() == expected
    assert finished["running"].versions.tolist() == [1] * 3 + [4] * 5


def test_lengths_depend_on_the_trajectory_alone(new_trajectory: Build) -> None:
    for lengths in (fixed(5), evenly(3, 9, seed=1), long_tailed(20, 1.0, 200, seed=1)):
        t = new_trajectory("t")
        begun = t.extended(
            Segment(
                generated=True,
                tokens=np.array([1, 2], dtype=np.int32),
                log_probs=np.zeros(2, dtype=np.float32),
                versions=np.zeros(2, dtype=np.int32),
            )
        )
        assert lengths(t) == lengths(begun)


def test_length_distributions_have_the_shape_they_are_asked_for(new_trajectory: Build) -> None:
    many = [new_trajectory(f"t{i}") for i in range(2000)]
    even = [evenly(3, 6, seed=0)(t) for t in many]
    assert set(even) == {3, 4, 5, 6}
    assert np.bincount(even)[3:].tolist() == pytest.approx([500] * 4, abs=90)
    tailed = [long_tailed(20, 1.0, 150, seed=0)(t) for t in many]
    assert np.median(tailed) == pytest.approx(20, abs=2)
    # One in 1.2816 deviations: the 90th percentile of the lognormal is 20 e^1.2816 = 72.
    assert np.percentile(tailed, 90) == pytest.approx(72, abs=9)
    assert max(tailed) == 150
    assert [evenly(3, 60, seed=1)(t) for t in many[:9]] != [evenly(3, 60, seed=2)(t) for t in many[:9]]


def test_each_turn_has_its_own_length(new_fake: Build, new_trajectory: Build, drain: Build) -> None:
    engine = new_fake(lengths=evenly(2, 9, seed=3))
    engine.add(new_trajectory("t", max_new_tokens=100))
    first = drain(engine)["t"]
    second_turn = first.extended(Segment.given([5, 5])).finished(None)
    assert turn_start(second_turn) == first.response_len + 2
    engine.add(second_turn)
    second = drain(engine)["t"]
    wanted = evenly(2, 9, seed=3)
    assert first.response_len == wanted(new_trajectory("t"))
    assert second.response_len == first.response_len + 2 + wanted(second_turn)


def test_steps_spend_what_the_cost_model_says(new_fake: Build, new_trajectory: Build) -> None:
    spent: list[float] = []
    costs = CostModel(k1=1.0, k2=150.0, k3=100.0, k4=1000.0, prefill=10000.0, pull=0.5)
    engine = new_fake(seconds_per_step=costs, spend=spent.append)
    engine.add(new_trajectory("a", 5))
    engine.step()  # 5 tokens joined
    engine.add(new_trajectory("b", 3))
    engine.step()  # 3 joined the 6 there are: 9 in the KV cache of 2
    engine.load_weights({}, 1, "keep_kv")
    engine.load_weights({}, 2, "recompute")  # 11 tokens rebuilt
    engine.step()
    assert spent == [51155.0, 31209.0, 0.5, 110000.5, 1211.0]
    load = engine.load()
    assert (load.decode_steps, load.running_steps, load.kv_token_steps) == (3, 5, 5 + 9 + 11)
    assert load.prefilled_tokens == 5 + 3


def test_a_step_with_nothing_to_decode_spends_and_counts_nothing(new_fake: Build) -> None:
    spent: list[float] = []
    engine = new_fake(seconds_per_step=2.0, spend=spent.append)
    engine.step()
    assert spent == []
    assert engine.load().decode_steps == 0


def test_scripted_failure_hits_its_step_and_all_later_ones(new_fake: Build, new_trajectory: Build) -> None:
    """F16."""
    engine = new_fake(script=FakeScript(fail_at_step=3))
    engine.add(new_trajectory("t"))
    engine.step()
    engine.step()
    for _ in range(2):
        with pytest.raises(EngineError, match="scripted failure at step"):
            engine.step()
    assert engine.trajectories()["t"].response_len == 2


def test_scripted_refusals_keep_the_old_version(new_fake: Build) -> None:
    """F36."""
    engine = new_fake(script=FakeScript(refuse_loads=2))
    for _ in range(2):
        with pytest.raises(EngineError, match="scripted refusal of weight version 1"):
            engine.load_weights({}, 1, "recompute")
        assert engine.version == 0
    engine.load_weights({}, 1, "recompute")
    assert engine.version == 1


def test_a_lost_trajectory_vanishes_once_and_a_frozen_one_stays(
    new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    """F15."""
    engine = new_fake(script=FakeScript(lose=frozenset({"lost"}), freeze=frozenset({"frozen"})))
    for name in ("lost", "frozen", "fine"):
        engine.add(new_trajectory(name))
    assert set(engine.trajectories()) == {"frozen", "fine"}
    for _ in range(20):
        engine.step()
    assert engine.trajectories()["frozen"].response_len == 0
    assert engine.load().running == 1
    engine.abort(["frozen"])
    engine.add(new_trajectory("lost"))
    assert drain(engine)["lost"].response_len == 8


def test_a_scripted_hang_calls_what_it_is_given(new_fake: Build) -> None:
    gate = threading.Event()
    engine = new_fake(script=FakeScript(hang_at_step=2, hang=gate.set))
    engine.step()
    assert not gate.is_set()
    engine.step()
    assert gate.is_set()


def test_without_stop_tokens_it_still_stops_at_its_length(
    new_fake: Build, new_trajectory: Build, drain: Build
) -> None:
    engine = new_fake(sampling=SamplingParams(), lengths=fixed(4))
    engine.add(new_trajectory("t"))
    t: Trajectory = drain(engine)["t"]
    assert (t.response_len, t.finish_reason) == (4, FinishReason.STOP)
