"""Rollout engines and the models in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.config.schema import Config
from staleflow.coordination.cost_model import CostModel
from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Trajectory
from staleflow.registry import load_named
from staleflow.rollout.engine import Engine, SamplingParams
from staleflow.runtime.assembly.data import DEFAULT_CONTEXT, max_model_len
from staleflow.storage.cost_file import load_cost_model
from staleflow.training.models import model_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from staleflow.servers.transport import Handle

NO_WEIGHTS = -1
"""Version of an engine that has not pulled yet."""


def build_engine(
    config: Config,
    tokenizer: Tokenizer,
    *,
    spend: Callable[[float], object],
    endless: bool = False,
    weights: Handle | None = None,
    log: Path | None = None,
) -> Engine:
    """An engine without weights. `spend` lets the fake engine's time pass. `endless`: no token, and no
    scripted length, ends a trajectory, which measuring needs. `weights`: where an engine with processes of
    its own may have them take weights themselves. `log`: file for what those processes print."""
    rollout = config.rollout
    sampling = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=() if endless else tokenizer.stop_token_ids,
        max_model_len=max_model_len(config),
    )
    common: dict[str, Any] = {
        "sampling": sampling,
        "seed": config.run.seed,
        "kv_capacity_tokens": rollout.kv_capacity_tokens,
        "max_running": rollout.max_running,
        "version": NO_WEIGHTS,
    }
    if rollout.engine == "torch":
        from staleflow.rollout.torch.engine import TorchEngine

        limit_threads(rollout.threads)
        return TorchEngine(build_model(config), **common)
    if rollout.engine == "vllm":
        from staleflow.rollout.vllm.engine import VllmEngine

        vllm = rollout.vllm
        return VllmEngine(
            model_folder(config.model.source),
            **common,
            dtype=config.model.dtype,
            weights=weights,
            threads=rollout.threads,
            tensor_parallel=vllm.tensor_parallel,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            enforce_eager=vllm.enforce_eager,
            prefix_caching=vllm.prefix_caching,
            options=vllm.options,
            start_timeout_s=config.cluster.start_timeout_s,
            log=log,
        )
    if rollout.engine == "fake":
        from staleflow.rollout.fake import FakeEngine

        return FakeEngine(
            **common,
            vocab_size=tokenizer.vocab_size,
            lengths=(lambda trajectory: DEFAULT_CONTEXT) if endless else fake_lengths(config),
            seconds_per_step=fake_costs(config),
            spend=spend,
        )
    engine: Engine = load_named("rollout engine", rollout.engine, {})(config=config, **common)
    return engine


def fake_costs(config: Config) -> float | CostModel:
    fake = config.rollout.fake
    if fake.cost_model is None:
        return fake.seconds_per_step
    return load_cost_model(Path(fake.cost_model).expanduser())


def fake_lengths(config: Config) -> Callable[[Trajectory], int]:
    from staleflow.rollout.scripted_lengths import evenly, fixed, long_tailed

    lengths, seed = config.rollout.fake.lengths, config.run.seed
    if lengths.kind == "fixed":
        return fixed(round(lengths.mean))
    if lengths.kind == "uniform":
        return evenly(lengths.min, lengths.max, seed=seed)
    return long_tailed(lengths.mean, lengths.sigma, lengths.max, seed=seed)


def build_model(config: Config) -> PreTrainedModel:
    """The model as its folder has it."""
    from staleflow.training.models import load_model

    return load_model(config.model.source, config.model.dtype)


def initial_weights(config: Config) -> Mapping[str, NDArray[Any]]:
    """The weights of the model's folder, as a pull brings them; none for the fake engine."""
    if config.rollout.engine == "fake":
        return {}
    tensors = build_model(config).state_dict()
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}


def limit_threads(threads: int) -> None:
    """Let torch use so many threads of this process: more than there are cores make each other wait."""
    import torch

    torch.set_num_threads(threads)
