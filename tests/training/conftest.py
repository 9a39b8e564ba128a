"""A tiny random Llama, and members and batches made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.data.trajectory import (
    FinishReason,
    Prompt,
    Reward,
    ScoredTrajectory,
    Segment,
    TrainBatch,
    Trajectory,
)
from staleflow.training.algorithms import load_algorithm
from staleflow.training.critic import Critic
from staleflow.training.kl import KlPenalty
from staleflow.training.objective import Objective
from staleflow.training.outcomes import Discount
from staleflow.training.torch_trainer import TorchTrainer

VOCABULARY = 11


def tiny_llama(seed: int = 0, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def make_member(
    group: str,
    member: int,
    response: Sequence[int],
    raw: float,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    log_probs: Sequence[float] | None = None,
    version: int | Sequence[int] = 0,
    usable: bool = True,
    segments: tuple[Segment, ...] | None = None,
    finish_reason: FinishReason = FinishReason.STOP,
) -> ScoredTrajectory:
    count = len(response)
    if segments is None:
        generated = Segment(
            generated=True,
            tokens=np.asarray(response, dtype=np.int32),
            log_probs=np.asarray(log_probs if log_probs is not None else [-2.0] * count, dtype=np.float32),
            versions=np.full(count, version, dtype=np.int32),
        )
        segments = (generated,) if count else ()
    trajectory = Trajectory(
        trajectory_id=f"{group}-m{member}",
        group_id=group,
        member=member,
        prompt=Prompt(prompt_id=group, tokens=tuple(prompt), text="", answer=None),
        max_new_tokens=16,
        segments=segments,
        finish_reason=finish_reason,
    )
    return ScoredTrajectory(trajectory=trajectory, reward=Reward(raw=raw, usable=usable))


def make_batch(step: int = 0, seed: int = 0, groups: int = 3, members: int = 4) -> TrainBatch:
    """Responses of many lengths with behaviour log-probs some way off; rewards 0 or 1, never all equal."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        group = []
        for m in range(members):
            count = int(rng.integers(1, 12))
            group.append(
                make_member(
                    f"e0-p{g}-a0",
                    m,
                    rng.integers(0, VOCABULARY, count).tolist(),
                    float(m % 2),
                    prompt=rng.integers(0, VOCABULARY, 1 + g).tolist(),
                    log_probs=rng.uniform(-4.0, -0.5, count).tolist(),
                    version=step,
                )
            )
        made.append(tuple(group))
    return TrainBatch(step=step, groups=tuple(made))


OBJECTIVE: dict[str, Any] = {
    "algorithm": load_algorithm("dapo"),
    "correction": "tis",
    "minibatches": 1,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "tis_cap": 2.0,
    "overlong_buffer": 0,
    "overlong_penalty": 0.0,
    "max_new_tokens": 16,
    "bound": 1,
    "seed": 0,
    "icepop_band": (0.5, 5.0),
    "sequence_band": (0.8, 1.25),
    "kl": KlPenalty(),
    "discount": Discount(),
    "critic_warmup_steps": 0,
}
TRAINER: dict[str, Any] = {
    "temperature": 1.0,
    "learning_rate": 1e-2,
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "warmup_steps": 0,
    "max_grad_norm": 1e9,
    "micro_batch_tokens": 64,
}


def make_objective(**changes: Any) -> Objective:
    return Objective(**(OBJECTIVE | changes))


def make_critic(model: LlamaForCausalLM, **changes: Any) -> Critic:
    options = {
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "max_grad_norm": 1e9,
        "value_clip": 0.2,
    }
    return Critic(model, **(options | changes))


def make_trainer(model: LlamaForCausalLM, **changes: Any) -> TorchTrainer:
    about_loss = {name: changes.pop(name) for name in list(changes) if name in OBJECTIVE}
    return TorchTrainer(model, objective=make_objective(**about_loss), **(TRAINER | changes))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def new_model() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture
def member() -> Callable[..., ScoredTrajectory]:
    return make_member


@pytest.fixture
def batch_of() -> Callable[..., TrainBatch]:
    return make_batch


@pytest.fixture
def objective_of() -> Callable[..., Objective]:
    return make_objective


@pytest.fixture
def critic_of() -> Callable[..., Critic]:
    return make_critic


@pytest.fixture
def trainer_of() -> Callable[..., TorchTrainer]:
    return make_trainer


@pytest.fixture
def gradients() -> Iterator[list[list[torch.Tensor]]]:
    """The gradients that each optimizer step of the test was taken with."""
    seen: list[list[torch.Tensor]] = []

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([p.grad.clone() for p in parameters])

    handle = register_optimizer_step_pre_hook(look)
    yield seen
    handle.remove()


@pytest.fixture
def trainer_options() -> dict[str, Any]:
    """Those of `trainer_of` that are not about the loss."""
    return dict(TRAINER)
