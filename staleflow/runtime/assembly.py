"""The composition root: every part is built here, from the config, and nowhere else.

Invariant: this is the only module that knows both the config and the back ends. Parts get plain values. Heavy
libraries are imported where a part that needs them is built, so that each process loads what it uses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.config.algorithms import ALGORITHMS
from staleflow.config.schema import Config
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import START_VALUES, CostModel
from staleflow.coordination.migration import MigrationSettings
from staleflow.coordination.online_costs import OnlineCosts
from staleflow.coordination.policies import PolicySettings, build_coordinator, effective_bound
from staleflow.coordination.stragglers import StragglerRule
from staleflow.data.chat import ChatFormat
from staleflow.data.schedule import PromptSchedule, check_batch_size
from staleflow.data.sources import PromptSource, check_prompts, load_source
from staleflow.data.tokenizers import Tokenizer, load_tokenizer
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.errors import ConfigError
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.registry import load_named
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.engine import Engine, SamplingParams
from staleflow.runtime.evaluation import EvaluationPlan, Evaluator, Scorer
from staleflow.runtime.start import StartPoint
from staleflow.servers.trajectory_server import TrajectoryServer
from staleflow.storage.cost_file import load_cost_model
from staleflow.training.filtering import is_uninformative
from staleflow.training.models import context_length, model_folder
from staleflow.training.trainer import Trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from staleflow.servers.transport import Handle
    from staleflow.training.critic import Critic
    from staleflow.training.deepspeed.peers import Launch
    from staleflow.training.objective import Objective

NO_WEIGHTS = -1
"""Version of an engine that has not pulled yet."""
DEFAULT_CONTEXT = 1 << 20
"""Tokens, for a model whose config names no limit."""


def check_own_parts(config: Config) -> None:
    """Load what dotted paths and cost models name, before anything starts. Raises ConfigError."""
    engines = config.rollout.engine, evaluating(config).rollout.engine
    if "vllm" in engines:
        from staleflow.rollout.vllm.options import check_vllm

        check_vllm(config.rollout.vllm.options)
    if config.training.trainer == "deepspeed":
        check_deepspeed()
    for kind, name, known in (
        *(("rollout engine", engine, ("torch", "vllm", "fake")) for engine in engines),
        ("trainer", config.training.trainer, ("torch", "deepspeed")),
    ):
        if name not in known and not callable(load_named(kind, name, {})):
            raise ConfigError(f"{kind} {name!r} is neither a class nor a function: name one that builds it")
    if config.training.algorithm not in ALGORITHMS:
        from staleflow.training.algorithms import load_algorithm

        load_algorithm(config.training.algorithm)
    build_costs(config)
    _fake_costs(config)


# ---------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParts:
    """What is read before anything starts."""

    tokenizer: Tokenizer
    train: PromptSource
    held_out: tuple[Prompt, ...]
    """Empty when nothing is evaluated."""
    notes: tuple[str, ...] = ()
    """What a person should know of the sources, such as rows that were left out."""


def read_data(config: Config) -> DataParts:
    """Build tokenizer and sources, and check that every prompt can be used. Raises UserError."""
    tokenizer = build_tokenizer(config)
    longest = _longest_prompt(config, "rollout", config.rollout.max_new_tokens)
    train = build_source(config, tokenizer)
    check_batch_size(config.data.batch_size, len(train), epochs=config.data.epochs)
    check_prompts(train, longest)
    held_out: tuple[Prompt, ...] = ()
    notes: tuple[str, ...] = getattr(train, "notes", ())
    if config.evaluation.every:
        if config.evaluation.max_new_tokens is not None:
            longest = _longest_prompt(config, "evaluation", config.evaluation.max_new_tokens)
        source = build_held_out(config, tokenizer)
        check_prompts(source, longest, "evaluation.max_new_tokens")
        held_out = held_out_prompts(config, source)
        notes += tuple(f"held out: {note}" for note in getattr(source, "notes", ()))
    return DataParts(tokenizer=tokenizer, train=train, held_out=held_out, notes=notes)


def build_tokenizer(config: Config) -> Tokenizer:
    """The model's tokenizer, or the one named."""
    if config.model.tokenizer is not None:
        return load_tokenizer(Path(config.model.tokenizer).expanduser())
    return load_tokenizer(model_folder(config.model.source))


def build_source(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The training prompts."""
    return load_source(config.data.source, tokenizer, **_source_settings(config, held_out=False))


def build_held_out(config: Config, tokenizer: Tokenizer) -> PromptSource:
    """The evaluation prompts: another split, seed or file of the same source."""
    return load_source(config.data.source, tokenizer, **_source_settings(config, held_out=True))


def held_out_prompts(config: Config, source: PromptSource) -> tuple[Prompt, ...]:
    """What is evaluated on: the first evaluation.prompts of a held-out source."""
    return tuple(source.prompt(i) for i in range(min(len(source), config.evaluation.prompts)))


def _source_settings(config: Config, *, held_out: bool) -> dict[str, Any]:
    data = config.data
    return {
        "split": "held_out" if held_out else "train",
        "size": config.evaluation.prompts if held_out else data.size,
        "seed": config.run.seed,
        "path": data.path,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "answer_marker": data.answer_marker,
        "chat": ChatFormat(
            template=data.chat_template,
            system=data.system_prompt,
            around=data.prompt_template,
            options=data.chat_options,
        ),
        "options": data.options,
    }


def max_model_len(config: Config) -> int:
    """Tokens of prompt and response together: the config's own limit, or the model's. Raises ConfigError."""
    own, limit = context_length(model_folder(config.model.source)), config.rollout.max_model_len
    if own is not None and limit is not None and limit > own:
        raise ConfigError(
            f"rollout.max_model_len is {limit}, but the model reads at most {own} tokens: lower it"
        )
    return limit or own or DEFAULT_CONTEXT


def _longest_prompt(config: Config, section: str, max_new_tokens: int) -> int:
    """Tokens of a prompt that leave room for a whole response."""
    longest = max_model_len(config) - max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"{section}.max_new_tokens is {max_new_tokens}, which leaves no room for a prompt "
            f"in the model's {max_model_len(config)} tokens: lower it"
        )
    return longest


def scoring_request(tokenizer: Tokenizer) -> Callable[[Trajectory], ScoreRequest]:
    """A function from a finished trajectory to what its verifier gets."""

    def request(trajectory: Trajectory) -> ScoreRequest:
        prompt = trajectory.prompt
        return ScoreRequest(
            trajectory_id=trajectory.trajectory_id,
            prompt=prompt.text,
            response=tokenizer.decode(trajectory.tokens.tolist()),
            answer=prompt.answer,
            metadata=dict(prompt.metadata),
        )

    return request


# ---------------------------------------------------------------------- control and trajectory server


def build_control(
    config: Config,
    start: StartPoint,
    *,
    costs: OnlineCosts | None = None,
    patience: Patience | None = None,
    filtered: bool = True,
) -> Control:
    """Buffer, coordinator and lifecycle of this attempt.

    A simulation gives `costs` and `patience` of its own; `filtered` false: no group is, whatever the config
    says.
    """
    coordination, data = config.coordination, config.data
    return Control(
        buffer=StalenessBuffer(
            bound=kept_bound(config),
            batch_size=data.batch_size,
            spare_limit=config.redundancy.groups,
            next_buffer=start.step,
        ),
        coordinator=build_policy(config),
        batches=BatchSettings(
            steps=config.run.steps,
            group_size=data.group_size,
            last_batch=data.last_batch,
            max_filtered_batches=data.max_filtered_batches,
        ),
        patience=patience
        or Patience(stall_after_s=config.rollout.lost_after_s, max_retries=config.rollout.max_retries),
        stragglers=StragglerRule(
            action=coordination.stragglers.action, at_most=coordination.stragglers.at_most
        ),
        expected_response=max(1, config.rollout.max_new_tokens // 4),
        group_filter=is_uninformative if filtered and config.training.dynamic_sampling else None,
        costs=costs or build_costs(config),
        attempt=start.attempt,
        next_seq=start.next_seq,
    )


def build_costs(config: Config) -> OnlineCosts:
    """The cost model that the run starts with. Raises ConfigError for a file that holds none."""
    coordination = config.coordination
    named = coordination.cost_model
    start = load_cost_model(Path(named).expanduser()) if named is not None else START_VALUES
    return OnlineCosts(start, refine=coordination.refine_costs)


def kept_bound(config: Config) -> int:
    """The staleness bound that the policy keeps: that of the config, or less."""
    return effective_bound(config.coordination.policy, config.staleness.bound)


def build_policy(config: Config) -> Coordinator:
    """The coordinator of the config's policy, with the strategies that the config puts in their place."""
    coordination, rollout = config.coordination, config.rollout
    routing, migration = coordination.routing, coordination.migration
    return build_coordinator(
        coordination.policy,
        PolicySettings(
            routing=routing.strategy,
            synchronization=coordination.synchronization.strategy,
            migration=migration.strategy,
            mu=routing.mu,
            kv_headroom=routing.kv_headroom,
            max_per_instance=routing.max_per_instance or rollout.max_running,
            moves=MigrationSettings(
                phi_wait=migration.phi_wait,
                psi_throughput=migration.psi_throughput,
                rest_s=migration.rest_s,
                kv_headroom=routing.kv_headroom,
                longest_response=rollout.max_new_tokens,
            ),
            recompute=rollout.on_pull == "recompute",
        ),
    )


def build_trajectory_server(config: Config, source: PromptSource, start: StartPoint) -> TrajectoryServer:
    """Payload storage, fed from the prompts that this attempt has not used yet."""
    data = config.data

    def prompts(epochs: int | None, used: Mapping[int, set[int]]) -> Iterator[tuple[int, int, Prompt]]:
        schedule = PromptSchedule(
            len(source), epochs=epochs, seed=config.run.seed, shuffle=data.shuffle, used=used
        )
        return ((epoch, index, source.prompt(index)) for epoch, index in schedule)

    everything = set(range(len(source)))
    past = {epoch: everything for epoch in range(data.epochs or 0)}
    return TrajectoryServer(
        prompts=prompts(data.epochs, start.used),
        padding=prompts(None, {**past, **{e: u for e, u in start.used.items() if e not in past}}),
        members=data.group_size + config.redundancy.members,
        max_new_tokens=config.rollout.max_new_tokens,
        attempt=start.group_attempt,
    )


# ---------------------------------------------------------------------- engines


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
            lengths=(lambda trajectory: DEFAULT_CONTEXT) if endless else _fake_lengths(config),
            seconds_per_step=_fake_costs(config),
            spend=spend,
        )
    engine: Engine = load_named("rollout engine", rollout.engine, {})(config=config, **common)
    return engine


def _fake_costs(config: Config) -> float | CostModel:
    fake = config.rollout.fake
    if fake.cost_model is None:
        return fake.seconds_per_step
    return load_cost_model(Path(fake.cost_model).expanduser())


def _fake_lengths(config: Config) -> Callable[[Trajectory], int]:
    from staleflow.rollout.lengths import evenly, fixed, long_tailed

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


# ---------------------------------------------------------------------- trainer, rewards, evaluation


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
    if training.attention is not None:
        model.set_attn_implementation(training.attention)
    return TorchTrainer(
        model,
        objective=objective,
        reference=build_reference(config) if objective.needs.reference else None,
        critic=build_critic(config) if objective.needs.values else None,
        **_trainer_options(config),
    )


def _build_deepspeed_trainer(config: Config, launch: Launch | None, host: str) -> Trainer:
    check_deepspeed()
    from staleflow.training.deepspeed.peers import ProcessPeer
    from staleflow.training.deepspeed.settings import RankSettings
    from staleflow.training.deepspeed.trainer import DeepSpeedTrainer
    from staleflow.training.deepspeed.world import World

    training, deepspeed = config.training, config.training.deepspeed
    objective = build_objective(config)
    if objective.needs.values:
        raise ConfigError(
            f"training.algorithm {training.algorithm!r} has a critic, which only the torch trainer trains: "
            "set training.trainer to torch"
        )
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
    """Raises ConfigError where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "training.trainer is deepspeed, but the package deepspeed is not installed: run `make deepspeed` "
            "or set training.trainer to torch"
        )


def build_pool(config: Config, log: Path | None = None) -> Scorer:
    """Verifier processes with hard limits."""
    from staleflow.reward.pool import RewardPool

    reward = config.reward
    return RewardPool(
        reward.verifier,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        memory_mb=reward.memory_mb,
        on_failure=reward.on_failure,
        log=log,
    )


def build_inline_scorer(config: Config) -> Scorer:
    """The verifier in this process, without limits."""
    from staleflow.reward.inline import InlineScorer

    return InlineScorer(config.reward.verifier, config.reward.on_failure)


def build_evaluator(
    config: Config,
    tokenizer: Tokenizer,
    prompts: tuple[Prompt, ...],
    scorer: Scorer,
    *,
    weights: Handle | None = None,
    log: Path | None = None,
) -> Evaluator:
    """An engine of its own over the held-out prompts."""

    def no_time(seconds: float) -> None:
        """Evaluation with the fake engine takes no time."""

    evaluation = config.evaluation
    return Evaluator(
        engine=build_engine(evaluating(config), tokenizer, spend=no_time, weights=weights, log=log),
        prompts=prompts,
        scorer=scorer,
        request=scoring_request(tokenizer),
        plan=EvaluationPlan(
            max_new_tokens=evaluation.max_new_tokens or config.rollout.max_new_tokens,
            samples=evaluation.samples,
            pass_at=evaluation.pass_at,
            pass_score=evaluation.pass_score,
            greedy=evaluation.greedy,
        ),
    )


def evaluating(config: Config) -> Config:
    """The config as the evaluation's engine sees it."""
    engine = config.evaluation.engine or config.rollout.engine
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def instance_names(config: Config) -> list[str]:
    """`i0`, `i1`, ..."""
    return [f"i{n}" for n in range(config.rollout.instances)]
