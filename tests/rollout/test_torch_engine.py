"""The torch engine against plain forward passes of the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.data.trajectory import FinishReason, Segment, Trajectory
from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.torch import TorchEngine

Build = Callable[..., Any]
PROMPTS = {"a": 1, "b": 4, "c": 9, "d": 2, "e": 17, "f": 6, "g": 3}
"""Prompt lengths, mixed on purpose."""


def some(new_trajectory: Build, names: str = "abcdefg", **more: int) -> list[Trajectory]:
    budgets = {name: 6 + 5 * i % 13 for i, name in enumerate(PROMPTS)}
    return [
        new_trajectory(name, PROMPTS[name], max_new_tokens=more.get("max_new_tokens", budgets[name]))
        for name in names
    ]


def add_all(engine: TorchEngine, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        engine.add(trajectory)


def ids(trajectories: dict[str, Trajectory]) -> dict[str, list[int]]:
    return {name: t.tokens.tolist() for name, t in trajectories.items()}


def test_a_greedy_trajectory_is_that_of_a_greedy_engine_and_disturbs_no_other(
    new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    """One engine for both kinds, over preemptions, an interruption and a pull of the same weights."""
    alone = {}
    for temperature, names in ((0.0, "bd"), (0.7, "ac")):
        engine = new_engine(new_model(), sampling=SamplingParams(temperature=temperature))
        add_all(engine, some(new_trajectory, names))
        alone |= drain(engine)
    model = new_model()
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    both = new_engine(model, sampling=SamplingParams(temperature=0.7), kv_capacity_tokens=30)
    for trajectory in some(new_trajectory, "abcd"):
        both.add(trajectory, greedy=trajectory.trajectory_id in "bd")
    for _ in range(3):
        both.step()
    (half,) = both.interrupt(["b"])
    both.add(half, greedy=True)
    both.load_weights(weights, 1, "recompute")
    finished = drain(both)
    assert both.load().preemptions > 0
    assert ids(finished) == ids(alone)
    for name, trajectory in finished.items():
        np.testing.assert_allclose(trajectory.log_probs, alone[name].log_probs, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_at_the_sampling_temperature(
    family: str,
    temperature: float,
    new_model: Build,
    new_engine: Build,
    new_trajectory: Build,
    drain: Build,
    teacher_forced: Build,
) -> None:
    """F13, in mixed-length batches that trajectories join and leave all the time."""
    model = new_model(family)
    engine = new_engine(model, sampling=SamplingParams(temperature=temperature), max_running=4)
    add_all(engine, some(new_trajectory))
    finished = drain(engine)
    assert sorted(finished) == sorted(PROMPTS)
    for trajectory in finished.values():
        expected = teacher_forced(model, trajectory, temperature)
        np.testing.assert_allclose(trajectory.log_probs, expected, atol=1e-4)


def test_greedy_tokens_are_the_argmax_and_log_probs_are_at_temperature_one(
    new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build, teacher_forced: Build
) -> None:
    model = new_model()
    engine = new_engine(model, sampling=SamplingParams(temperature=0))
    add_all(engine, some(new_trajectory, "bc"))
    for trajectory in drain(engine).values():
        sequence = list(trajectory.prompt.tokens)
        for token in trajectory.tokens:
            with torch.no_grad():
                best = int(model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax())
            assert token == best
            sequence.append(best)
        np.testing.assert_allclose(trajectory.log_probs, teacher_forced(model, trajectory), atol=1e-4)


def test_a_trajectory_has_the_same_tokens_alone_in_a_batch_and_on_another_engine(
    new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    """F33: the seed belongs to the trajectory, not to the instance."""
    together = new_engine()
    add_all(together, some(new_trajectory))
    expected = ids(drain(together))
    other = new_engine(new_model(), max_running=2, prefill_chunk_tokens=3, kv_capacity_tokens=60)
    add_all(other, some(new_trajectory)[::-1])
    assert ids(drain(other)) == expected
    for trajectory in some(new_trajectory, "ace"):
        alone = new_engine()
        alone.add(trajectory)
        assert ids(drain(alone)) == {trajectory.trajectory_id: expected[trajectory.trajectory_id]}


def test_members_of_a_group_and_other_seeds_give_different_samples(
    new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    """F33: two instances that share a prompt must not share the samples."""
    samples = []
    for seed, names in ((1, ("m0", "m1")), (2, ("m0", "m1"))):
        engine = new_engine(seed=seed)
        add_all(engine, [new_trajectory(name, [1, 2, 3], max_new_tokens=20) for name in names])
        samples += [tuple(tokens) for tokens in ids(drain(engine)).values()]
    assert len(set(samples)) == 4


@pytest.mark.parametrize("k", [0, 1, 2, 7, 11, 12])
def test_interrupted_after_k_tokens_and_resumed_elsewhere_it_goes_on_as_if_undisturbed(
    k: int, new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build, teacher_forced: Build
) -> None:
    """F8, F9 and F33: aligned arrays, the rest of the budget only, the same samples."""
    target = new_trajectory("target", 5, max_new_tokens=12)
    undisturbed = new_engine()
    undisturbed.add(target)
    expected = drain(undisturbed)["target"]

    first, second = new_engine(), new_engine(max_running=3)
    add_all(first, [new_trajectory("x", 9), target])
    finished = [t for _ in range(k) for t in first.step()]
    interrupted = list(first.interrupt(["target", "unknown"]))
    if k == 12:
        assert interrupted == []  # it has finished, and left with all its tokens
        assert [t.trajectory_id for t in finished if t.trajectory_id == "target"] == ["target"]
        return
    assert interrupted[0].response_len == k
    assert interrupted[0].remaining_tokens == 12 - k
    assert "target" not in first.trajectories()
    drain(first)
    add_all(second, [new_trajectory("y", 3), interrupted[0]])
    resumed = drain(second)["target"]
    assert resumed.tokens.tolist() == expected.tokens.tolist()
    assert (
        len(resumed.tokens) == len(resumed.log_probs) == len(resumed.loss_mask) == len(resumed.versions) == 12
    )
    assert resumed.finish_reason is FinishReason.LENGTH
    np.testing.assert_allclose(resumed.log_probs, teacher_forced(new_model(), resumed), atol=1e-4)


def test_one_added_without_budget_finishes_at_the_next_step_without_a_token(
    new_engine: Build, new_trajectory: Build
) -> None:
    """F9: a resumed trajectory at its budget, or at the model's length, is truncated, not extended."""
    engine = new_engine(sampling=SamplingParams(max_model_len=20))
    at_budget = new_trajectory("budget", 5, max_new_tokens=3).extended(Segment.given([1, 2, 3]))
    at_length = new_trajectory("length", 20)
    add_all(engine, [at_budget, at_length])
    assert engine.load().waiting == 2
    done = engine.step()
    assert [(t.trajectory_id, t.response_len, t.finish_reason) for t in done] == [
        ("budget", 3, FinishReason.LENGTH),
        ("length", 0, FinishReason.LENGTH),
    ]
    assert engine.load().generated_tokens == 0


def test_prompt_and_response_never_exceed_the_model_length(
    new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    """F9. Where the model has fewer positions (128 here) than max_model_len, those bound it."""
    engine = new_engine(sampling=SamplingParams(max_model_len=20))
    engine.add(new_trajectory("t", 15, max_new_tokens=100))
    assert drain(engine)["t"].length == 20
    engine = new_engine(new_model("gpt2"))
    engine.add(new_trajectory("t", 120, max_new_tokens=100))
    trajectory = drain(engine)["t"]
    assert (trajectory.length, trajectory.finish_reason) == (128, FinishReason.LENGTH)


def test_a_stop_token_ends_it_and_is_kept(new_engine: Build, new_trajectory: Build, drain: Build) -> None:
    free = new_engine()
    free.add(new_trajectory("t", 5, max_new_tokens=30))
    tokens = drain(free)["t"].tokens.tolist()
    stop = tokens[9]
    engine = new_engine(sampling=SamplingParams(stop_token_ids=(stop,)))
    engine.add(new_trajectory("t", 5, max_new_tokens=30))
    stopped = drain(engine)["t"]
    assert stopped.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_given_tokens_within_a_response_are_kept_and_counted(
    new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    engine = new_engine()
    engine.add(new_trajectory("t", 4, max_new_tokens=10))
    for _ in range(3):
        engine.step()
    (half,) = engine.interrupt(["t"])
    engine.add(half.extended(Segment.given([5, 6])))
    whole = drain(engine)["t"]
    assert whole.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 5
    assert whole.tokens[3:5].tolist() == [5, 6]


def test_a_full_kv_cache_preempts_and_changes_no_token(
    new_engine: Build, new_trajectory: Build, drain: Build, teacher_forced: Build, new_model: Build
) -> None:
    roomy = new_engine()
    add_all(roomy, some(new_trajectory, max_new_tokens=20))
    tight = new_engine(kv_capacity_tokens=50)
    add_all(tight, some(new_trajectory, max_new_tokens=20))
    finished = drain(tight)
    assert ids(finished) == ids(drain(roomy))
    assert tight.load().preemptions > 0
    assert roomy.load().preemptions == 0
    for trajectory in finished.values():
        np.testing.assert_allclose(trajectory.log_probs, teacher_forced(new_model(), trajectory), atol=1e-4)


def test_one_that_never_fits_the_kv_cache_is_refused(new_engine: Build, new_trajectory: Build) -> None:
    engine = new_engine(kv_capacity_tokens=10)
    with pytest.raises(EngineError, match="cannot gain one more"):
        engine.add(new_trajectory("t", 12))
    assert engine.trajectories() == {}


def test_load_counts_what_is_held(new_engine: Build, new_trajectory: Build) -> None:
    engine = new_engine(max_running=2)
    add_all(engine, some(new_trajectory, "abc", max_new_tokens=20))
    engine.step()
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.generated_tokens) == (2, 1, 4)
    assert load.kv_tokens == 1 + 4 + 4
    assert [t.trajectory_id for t in engine.abort(["a", "c", "nobody"])] == ["a", "c"]
    assert (engine.load().running, engine.load().waiting, engine.load().kv_tokens) == (1, 0, 6)


def test_weights_that_give_nan_are_an_engine_error(
    new_model: Build, new_engine: Build, new_trajectory: Build
) -> None:
    model = new_model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    engine = new_engine(model)
    engine.add(new_trajectory("t"))
    with pytest.raises(EngineError, match="not finite"):
        engine.step()


def test_models_that_would_be_decoded_wrongly_are_refused(new_model: Build, new_engine: Build) -> None:
    model = new_model("qwen2")
    model.config.sliding_window = 16
    with pytest.raises(EngineError, match="attends to 16 tokens only; set max_model_len to 16 or less"):
        new_engine(model)
    new_engine(model, sampling=SamplingParams(max_model_len=16))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="linear_attention"):
        new_engine(model, sampling=SamplingParams(max_model_len=16))


def test_a_closed_engine_refuses_work(new_engine: Build, new_trajectory: Build) -> None:
    engine = new_engine()
    engine.add(new_trajectory("t"))
    engine.close()
    assert engine.trajectories() == {}
    with pytest.raises(EngineError, match="closed"):
        engine.step()
