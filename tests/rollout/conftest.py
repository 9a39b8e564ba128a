"""Tiny random models and trajectories; every engine handed out is checked after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.rollout.batching import BatchingEngine
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.fake import FakeEngine
from staleflow.rollout.torch import TorchEngine

VOCAB = 19

torch.set_num_threads(1)


def llama() -> PreTrainedConfig:
    """Grouped-query attention, untied embeddings."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )


def gpt2() -> PreTrainedConfig:
    """Learned absolute positions, tied embeddings."""
    return GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=128,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
    )


def qwen2() -> PreTrainedConfig:
    """Biased projections, tied embeddings, eager attention."""
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    config._attn_implementation = "eager"
    return config


MODELS = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}


@pytest.fixture
def new_model() -> Callable[..., torch.nn.Module]:
    """Build a model: `new_model(family="llama", seed=0)`."""

    def build(family: str = "llama", seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        config = MODELS[family]()
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        assert config._attn_implementation == ("eager" if family == "qwen2" else "sdpa")
        return model.eval()

    return build


@pytest.fixture
def new_trajectory() -> Callable[..., Trajectory]:
    """Build a trajectory: id, and prompt of random tokens or of those given."""

    def build(
        name: str, prompt: int | list[int] = 5, max_new_tokens: int = 12, group: str = "e0-p0-a0"
    ) -> Trajectory:
        drawn = np.random.default_rng(0).integers(0, VOCAB, prompt if isinstance(prompt, int) else 0)
        tokens = drawn.tolist() if isinstance(prompt, int) else prompt
        return Trajectory(
            trajectory_id=name,
            group_id=group,
            member=0,
            prompt=Prompt(prompt_id="0", tokens=tuple(tokens), text="", answer=None),
            max_new_tokens=max_new_tokens,
        )

    return build


def check(engine: BatchingEngine) -> None:
    """The invariants that hold between any two calls."""
    load = engine.load()
    assert load.kv_tokens <= load.kv_capacity
    held = engine.trajectories()
    assert len(held) == load.running + load.waiting
    for trajectory in held.values():
        lengths = [len(trajectory.tokens), len(trajectory.log_probs), len(trajectory.versions)]
        assert lengths == [trajectory.response_len] * 3
        assert len(trajectory.loss_mask) == trajectory.response_len


@pytest.fixture
def new_engine(new_model: Callable[..., torch.nn.Module]) -> Iterator[Callable[..., TorchEngine]]:
    """Build a torch engine around a fresh llama, or around `model`. All are checked at the end."""
    engines: list[TorchEngine] = []

    def build(
        model: torch.nn.Module | None = None,
        *,
        sampling: SamplingParams | None = None,
        seed: int = 7,
        kv_capacity_tokens: int = 1000,
        max_running: int = 16,
        **more: int,
    ) -> TorchEngine:
        engine = TorchEngine(
            model if model is not None else new_model(),
            sampling=sampling or SamplingParams(),
            seed=seed,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running=max_running,
            **more,
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        check(engine)
        engine.close()
        engine.close()


@pytest.fixture
def new_fake() -> Callable[..., FakeEngine]:
    """Build a fake engine with seed 7; keyword arguments as FakeEngine takes them."""

    def build(**arguments: object) -> FakeEngine:
        defaults: dict[str, object] = {"sampling": SamplingParams(stop_token_ids=(0,)), "seed": 7}
        return FakeEngine(**{**defaults, **arguments})  # type: ignore[arg-type]

    return build


@pytest.fixture
def drain() -> Callable[..., dict[str, Trajectory]]:
    """Step an engine until nothing is left, checking its invariants; returns the finished by id."""

    def run(engine: BatchingEngine, limit: int = 2000) -> dict[str, Trajectory]:
        finished: dict[str, Trajectory] = {}
        for _ in range(limit):
            if not engine.trajectories():
                return finished
            finished.update((t.trajectory_id, t) for t in engine.step())
            check(engine)
        raise AssertionError(f"still holding {sorted(engine.trajectories())} after {limit} steps")

    return run


@pytest.fixture
def teacher_forced() -> Callable[..., np.ndarray]:
    """Independent oracle: log-probs of the response by one plain forward pass without a cache."""

    def log_probs(model: torch.nn.Module, trajectory: Trajectory, temperature: float = 1.0) -> np.ndarray:
        prompt = trajectory.prompt.tokens
        ids = torch.tensor([[*prompt, *trajectory.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
        wanted = ids[0, len(prompt) :]
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        return rows.gather(1, wanted[:, None])[:, 0].numpy()

    return log_probs
