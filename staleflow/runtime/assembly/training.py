"""Objective, trainers, and the models beside the policy."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any

from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.registry import load_named
from staleflow.runtime.assembly.control import kept_bound
from staleflow.runtime.assembly.engines import build_model, limit_threads
from staleflow.runtime.start import StartPoint
from staleflow.training.models import model_folder, set_attention
from staleflow.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from staleflow.training.critic import Critic
    from staleflow.training.deepspeed.peers import Launch
    from staleflow.training.objective import Objective


def build_objective(config: Config) -> Objective:
    """What any trainer optimises."""
    from staleflow.training.algorithms import load_algorithm
    from staleflow.training.kl import KlPenalty
    from staleflow.training.objective import Objective
    from staleflow.training.outcomes import Discount

    training = config.training
    return Objective(
        algorithm=load_algorithm(training.algorithm),
        correction=training.correction,
        minibatches=training.minibatches,
        clip_low=training.clip_low,
        clip_high=training.clip_high,
        tis_cap=training.tis_cap,
        overlong_buffer=training.overlong_buffer,
        overlong_penalty=training.overlong_penalty,
        max_new_tokens=config.rollout.max_new_tokens,
        bound=kept_bound(config),
        seed=config.run.seed,
        icepop_band=training.icepop_band,
        sequence_band=training.sequence_band,
        kl=KlPenalty(
            coefficient=training.kl.coefficient, estimator=training.kl.estimator, place=training.kl.place
        ),
        discount=Discount(gamma=training.critic.gamma, gae_lambda=training.critic.gae_lambda),
        critic_warmup_steps=training.critic.warmup_steps,
    )


def build_reference(config: Config) -> PreTrainedModel:
    """The model that the policy is held near. Raises ConfigError when it has another vocabulary."""
    return _companion(config, "training.kl.reference", config.training.kl.reference)


def build_critic(config: Config) -> Critic:
    """A critic that knows nothing yet. Raises ConfigError when its model has another vocabulary."""
    from staleflow.training.critic import Critic

    training = config.training
    return Critic(
        _companion(config, "training.critic.source", training.critic.source),
        learning_rate=training.critic.learning_rate,
        weight_decay=training.weight_decay,
        betas=training.betas,
        max_grad_norm=training.max_grad_norm,
        value_clip=training.critic.value_clip,
    )


def _companion(config: Config, key: str, source: str | None) -> PreTrainedModel:
    """A model that reads the policy's tokens; None: the policy's initial weights."""
    if source is None:
        return build_model(config)
    from transformers import AutoConfig

    from staleflow.training.models import load_model

    model = load_model(source, config.model.dtype)
    own = model_folder(config.model.source)
    vocabulary = AutoConfig.from_pretrained(own, local_files_only=True).vocab_size
    if model.config.vocab_size != vocabulary:
        raise ConfigError(
            f"{key} {source!r} has a vocabulary of {model.config.vocab_size} tokens, but the policy's has "
            f"{vocabulary}: name a model with the same tokenizer"
        )
    return model


def build_trainer(
    config: Config, start: StartPoint, *, launch: Launch | None = None, host: str = "127.0.0.1"
) -> Trainer:
    """The trainer at the weights of the start point.

    `launch` starts the further ranks of the deepspeed trainer, which reach this process at `host`; None: as
    child processes.
    """
    training = config.training
    if training.trainer == "torch":
        trainer = _build_torch_trainer(config)
    elif training.trainer == "deepspeed":
        trainer = _build_deepspeed_trainer(config, launch, host)
    else:
        trainer = load_named("trainer", training.trainer, {})(config=config)
    if start.checkpoint is not None:
        try:
            trainer.load(start.checkpoint)
        except BaseException:
            trainer.close()
            raise
    return trainer


def _build_torch_trainer(config: Config) -> Trainer:
    from staleflow.training.torch_trainer import TorchTrainer

    training = config.training
    limit_threads(training.threads)
    objective, model = build_objective(config), build_model(config)
    set_attention(model, training.attention)
    return TorchTrainer(
        model,
        objective=objective,
        reference=build_reference(config) if objective.needs.reference else None,
        critic=build_critic(config) if objective.needs.values else None,
        **_trainer_options(config),
    )


def _build_deepspeed_trainer(config: Config, launch: Launch | None, host: str) -> Trainer:
    from staleflow.training.deepspeed.peers import ProcessPeer
    from staleflow.training.deepspeed.settings import RankSettings
    from staleflow.training.deepspeed.trainer import DeepSpeedTrainer
    from staleflow.training.deepspeed.world import World

    training, deepspeed = config.training, config.training.deepspeed
    objective = build_objective(config)
    settings = RankSettings(
        make_model=partial(build_model, config),
        make_reference=partial(build_reference, config) if objective.needs.reference else None,
        objective=objective,
        zero_stage=deepspeed.zero_stage,
        offload_optimizer=deepspeed.offload_optimizer,
        dtype="bfloat16" if config.model.dtype == "bfloat16" else "float32",
        attention=training.attention,
        threads=training.threads,
        **_trainer_options(config),
    )
    limit_s = config.cluster.start_timeout_s
    world = World(
        ranks=deepspeed.ranks,
        launch=launch or ProcessPeer,
        backend=deepspeed.backend,
        host=host,
        start_timeout_s=limit_s,
        timeout_s=deepspeed.timeout_s,
    )
    return DeepSpeedTrainer(world, settings, start_timeout_s=limit_s)


def _trainer_options(config: Config) -> dict[str, Any]:
    """What both trainers take."""
    training = config.training
    return {
        "temperature": config.rollout.temperature,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "betas": training.betas,
        "warmup_steps": training.warmup_steps,
        "max_grad_norm": training.max_grad_norm,
        "micro_batch_tokens": training.micro_batch_tokens,
        "packing": training.packing,
        "gradient_checkpointing": training.gradient_checkpointing,
    }


def check_deepspeed() -> None:
    """Raise ConfigError when DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "training.trainer is deepspeed, but the package deepspeed is not installed: run `make deepspeed` "
            "or set training.trainer to torch"
        )
