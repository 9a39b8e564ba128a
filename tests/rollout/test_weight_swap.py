"""Swapping weights under running trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.data.trajectory import Trajectory
from staleflow.errors import EngineError

Build = Callable[..., Any]
Weights = dict[str, np.ndarray]


def weights_of(model: torch.nn.Module) -> Weights:
    """Read-only copies, as a lease gives them."""
    tensors = {name: t.detach().numpy().copy() for name, t in model.state_dict().items()}
    for array in tensors.values():
        array.flags.writeable = False
    return tensors


def cached_log_prob(
    filler: torch.nn.Module, drawer: torch.nn.Module, trajectory: Trajectory, k: int
) -> float:
    """Log-prob of response token k under `drawer`, over KV of `filler` (all but the token fed)."""
    sequence = [*trajectory.prompt.tokens, *trajectory.tokens.tolist()]
    end = len(trajectory.prompt.tokens) + k
    with torch.no_grad():
        filled = filler(input_ids=torch.tensor([sequence[: end - 1]]), use_cache=True)
        drawn = drawer(
            input_ids=torch.tensor([sequence[end - 1 : end]]),
            past_key_values=filled.past_key_values,
            use_cache=True,
        )
    return float(torch.log_softmax(drawn.logits[0, -1], -1)[sequence[end]])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recompute_goes_on_exactly_as_the_new_model_would(
    family: str,
    new_model: Build,
    new_engine: Build,
    new_trajectory: Build,
    drain: Build,
    teacher_forced: Build,
) -> None:
    """F11: all stay, with their tokens; F13: what follows is the new weights' own."""
    old, new = new_model(family, 0), new_model(family, 1)
    engine = new_engine(new_model(family, 0))
    names = [f"t{i}" for i in range(16)]
    for i, name in enumerate(names):
        engine.add(new_trajectory(name, 1 + i % 6, max_new_tokens=10))
    for _ in range(4):
        engine.step()
    before = engine.trajectories()
    engine.load_weights(weights_of(new), 5, "recompute")
    assert engine.version == 5
    assert {n: t.tokens.tolist() for n, t in engine.trajectories().items()} == {
        n: t.tokens.tolist() for n, t in before.items()
    }
    assert (engine.load().running, engine.load().preemptions) == (16, 0)
    finished = drain(engine)
    for name in names:
        trajectory = finished[name]
        assert trajectory.versions.tolist() == [0] * 4 + [5] * 6
        np.testing.assert_allclose(trajectory.log_probs[:4], teacher_forced(old, trajectory)[:4], atol=1e-4)
        np.testing.assert_allclose(trajectory.log_probs[4:], teacher_forced(new, trajectory)[4:], atol=1e-4)


def test_keep_kv_draws_with_the_new_weights_over_the_old_kv(
    new_model: Build, new_engine: Build, new_trajectory: Build, teacher_forced: Build, drain: Build
) -> None:
    old, new = new_model("llama", 0), new_model("llama", 1)
    engine = new_engine(new_model("llama", 0))
    engine.add(new_trajectory("t", 6))
    for _ in range(3):
        engine.step()
    engine.load_weights(weights_of(new), 1, "keep_kv")
    trajectory = drain(engine)["t"]
    assert trajectory.versions.tolist() == [0] * 3 + [1] * 9
    mixed = cached_log_prob(old, new, trajectory, 3)
    assert trajectory.log_probs[3] == pytest.approx(mixed, abs=1e-4)
    assert abs(mixed - teacher_forced(new, trajectory)[3]) > 1e-3


@pytest.mark.parametrize("on_pull", ["recompute", "keep_kv"])
def test_a_prompt_prefilled_after_a_pull_is_the_new_weights_own(
    on_pull: str,
    new_model: Build,
    new_engine: Build,
    new_trajectory: Build,
    drain: Build,
    teacher_forced: Build,
) -> None:
    """F12: the same prompt was prefilled before, and its old KV must serve nobody else."""
    new = new_model("llama", 1)
    engine = new_engine(new_model("llama", 0))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    engine.add(new_trajectory("before", prompt, max_new_tokens=20))
    for _ in range(3):
        engine.step()
    engine.load_weights(weights_of(new), 1, on_pull)
    engine.add(new_trajectory("after", prompt))
    after = drain(engine)["after"]
    assert set(after.versions.tolist()) == {1}
    np.testing.assert_allclose(after.log_probs, teacher_forced(new, after), atol=1e-4)


def test_tied_embeddings_may_come_under_one_name_or_both(new_model: Build, new_engine: Build) -> None:
    new = new_model("gpt2", 1)
    both = weights_of(new)
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(both)
    for left_out in (None, "lm_head.weight", "transformer.wte.weight"):
        model = new_model("gpt2", 0)
        engine = new_engine(model)
        engine.load_weights({n: a for n, a in both.items() if n != left_out}, 1, "recompute")
        for name, tensor in model.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), both[name])


def spoil(weights: Weights, fault: str) -> Weights:
    """Weights with one fault in the last name, so that all others would have been copied before."""
    name, last = list(weights.items())[-1]
    match fault:
        case "missing":
            return {n: a for n, a in weights.items() if n != name}
        case "unknown":
            return {**weights, "model.extra": last}
        case "shape":
            return {**weights, name: np.zeros((*last.shape, 1), dtype=np.float32)}
        case "type":
            return {**weights, name: np.full(last.shape, "x")}
        case _:
            raise AssertionError(fault)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "lack lm_head.weight"),
        ("unknown", "no weights named model.extra"),
        ("shape", r"lm_head.weight has shape \(19, 16, 1\), the model's is \(19, 16\)"),
        ("type", "lm_head.weight has type <U1"),
    ],
)
def test_a_mismatch_is_refused_and_leaves_the_old_weights_entirely_in_place(
    fault: str, message: str, new_model: Build, new_engine: Build, new_trajectory: Build, drain: Build
) -> None:
    model = new_model("llama", 0)
    before = weights_of(model)
    engine = new_engine(model)
    engine.add(new_trajectory("t"))
    engine.step()
    with pytest.raises(EngineError, match=message):
        engine.load_weights(spoil(weights_of(new_model("llama", 1)), fault), 1, "recompute")
    assert engine.version == 0
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])
    assert set(drain(engine)["t"].versions.tolist()) == {0}


def test_unequal_values_for_one_tied_weight_are_refused(new_model: Build, new_engine: Build) -> None:
    weights = weights_of(new_model("gpt2", 1))
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    engine = new_engine(new_model("gpt2", 0))
    with pytest.raises(EngineError, match="are tied in this model but have different values"):
        engine.load_weights(weights, 1, "recompute")
    assert engine.version == 0
