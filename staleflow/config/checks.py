"""Combinations of settings that cannot work, each refused with its reason before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from staleflow.config.algorithms import ALGORITHMS, traits
from staleflow.config.schema import Config

Problem = tuple[str, str]
"""Key path, and why its value is refused."""


_REAL = ("training.micro_batch_tokens", "rollout.kv_capacity_tokens", "evaluation.max_new_tokens")
"""Checked for real runs only: a simulated run ignores them, or checks them against its own machines."""


def combination_problems(config: Config, *, simulated: bool = False) -> list[Problem]:
    """Every refused combination in a config whose single values are valid.

    `simulated`: only those that matter on simulated machines.
    """
    problems = [problem for check in _CHECKS for problem in check(config)]
    return [p for p in problems if p[0] not in _REAL] if simulated else problems


def _algorithm(config: Config) -> Iterator[Problem]:
    training, data = config.training, config.data
    bound = config.staleness.bound
    if bound > 0 and training.correction == "none":
        yield (
            "training.correction",
            f"with staleness.bound {bound} data lags behind the weights and needs a correction: "
            "set tis or another (none is for staleness.bound 0)",
        )
    compares = traits(training.algorithm).compares
    if compares and data.group_size == 1:
        yield (
            "data.group_size",
            f"{training.algorithm} compares the trajectories of a group, so a group needs at least 2",
        )
    if not compares and training.dynamic_sampling and training.algorithm in ALGORITHMS:
        yield (
            "training.dynamic_sampling",
            f"{training.algorithm} does not compare the members of a group, so it also learns from groups of "
            "equal rewards: set it to false",
        )
    elif not compares and training.dynamic_sampling and data.group_size == 1:
        yield (
            "training.dynamic_sampling",
            "the rewards of a group of one (data.group_size) are always equal, so every group would be "
            "dropped: set it to false",
        )
    for key in ("icepop_band", "sequence_band"):
        low, high = getattr(training, key)
        if not low < 1 < high:
            yield (
                f"training.{key}",
                "must contain 1, the ratio of data without lag: set one value below 1 and one above",
            )
    if training.minibatches > data.batch_size:
        yield (
            "training.minibatches",
            f"a batch of {data.batch_size} groups (data.batch_size) cannot be split into more: "
            f"at most {data.batch_size}",
        )


def _kl(config: Config) -> Iterator[Problem]:
    kl = config.training.kl
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield (
            "training.kl.estimator",
            "as a term of the loss, k1 has a gradient that is zero on average: set k2 or k3, or set "
            "training.kl.place to reward",
        )
    if kl.reference is not None and kl.coefficient == 0:
        yield "training.kl.reference", "has no effect without training.kl.coefficient: set it too"


def _trainer(config: Config) -> Iterator[Problem]:
    training, deepspeed = config.training, config.training.deepspeed
    if training.trainer != "deepspeed":
        return
    if traits(training.algorithm).critic:
        yield (
            "training.trainer",
            f"{training.algorithm} has a critic, which only the torch trainer trains: set it to torch, or "
            "choose an algorithm without a critic",
        )
    if config.model.dtype == "float16":
        yield (
            "model.dtype",
            "the deepspeed trainer supports float32 and bfloat16: float16 would need dynamic loss scaling",
        )
    if deepspeed.zero_stage == 0 and config.model.dtype == "bfloat16":
        yield (
            "training.deepspeed.zero_stage",
            "with model.dtype bfloat16 the optimizer keeps float32 weights, which needs stage 1, 2 or 3",
        )
    if deepspeed.zero_stage == 0 and deepspeed.offload_optimizer:
        yield "training.deepspeed.offload_optimizer", "needs training.deepspeed.zero_stage 1, 2 or 3"


def _sampling(config: Config) -> Iterator[Problem]:
    # F13: the engine would report log-probs of the filtered distribution, the trainer those of the whole one.
    reason = "the trainer computes log-probs over the whole distribution, so it must be off: set it to "
    if config.rollout.top_p < 1:
        yield "rollout.top_p", f"{reason}1.0"
    if config.rollout.top_k > 0:
        yield "rollout.top_k", f"{reason}0"
    if config.rollout.engine == "vllm" and config.rollout.temperature > 2:
        yield "rollout.temperature", "vLLM allows at most 2"


def _lengths(config: Config) -> Iterator[Problem]:
    rollout, training = config.rollout, config.training
    longest = rollout.max_model_len
    if longest is not None and rollout.max_new_tokens >= longest:
        yield (
            "rollout.max_new_tokens",
            f"leaves no room for a prompt within rollout.max_model_len {longest}: at most {longest - 1}",
        )
        return
    least = longest if longest is not None else rollout.max_new_tokens + 1
    what = "of the longest trajectory" if longest is not None else "of a whole response and a prompt"
    for key, value in (
        ("training.micro_batch_tokens", training.micro_batch_tokens),
        ("rollout.kv_capacity_tokens", rollout.kv_capacity_tokens),
    ):
        if value < least:
            yield key, f"cannot hold the tokens {what}: at least {least}"
    evaluated = config.evaluation.max_new_tokens
    if evaluated is not None and config.evaluation.every and evaluated >= rollout.kv_capacity_tokens:
        yield (
            "evaluation.max_new_tokens",
            "is more than an instance holds: it must be less than rollout.kv_capacity_tokens, "
            f"{rollout.kv_capacity_tokens}",
        )
    if training.overlong_buffer > rollout.max_new_tokens:
        yield (
            "training.overlong_buffer",
            f"is longer than a response, rollout.max_new_tokens {rollout.max_new_tokens}",
        )
    if training.overlong_penalty > 0 and training.overlong_buffer == 0:
        yield "training.overlong_penalty", "has no effect without training.overlong_buffer: set it too"
    lengths = rollout.fake.lengths
    if lengths.min > lengths.max:
        yield "rollout.fake.lengths.min", f"is more than rollout.fake.lengths.max {lengths.max}"
    if rollout.fake.cost_model is not None and rollout.fake.seconds_per_step > 0:
        yield (
            "rollout.fake.seconds_per_step",
            "rollout.fake.cost_model already sets the time of a step: leave one of them out",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.evaluation
    most = max(evaluation.pass_at, default=0)
    if most > evaluation.samples:
        yield (
            "evaluation.pass_at",
            f"pass@{most} needs at least {most} samples per prompt, but evaluation.samples is "
            f"{evaluation.samples}",
        )


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.source in ("jsonl", "parquet") and data.path is None:
        yield "data.path", f"a {data.source} source needs the path of its file"
    if data.path is not None and (data.source == "sums" or data.source.startswith("reasoning_gym:")):
        yield (
            "data.path",
            f"the source {data.source} does not read a file: leave it out, or set data.source to jsonl or "
            "parquet",
        )
    if "{prompt}" not in data.prompt_template:
        yield "data.prompt_template", "lacks {prompt}, which stands for the prompt's own text: add it"
    if data.size is not None and data.size < data.batch_size:
        yield "data.batch_size", f"is more than the prompts in the data set, data.size {data.size}"


def _cluster(config: Config) -> Iterator[Problem]:
    if config.cluster.runtime == "inline" and config.cluster.address is not None:
        yield "cluster.address", "an inline run uses no cluster: leave it out, or set cluster.runtime to ray"
    if config.cluster.ship and config.cluster.address is None:
        yield "cluster.ship", "works with an existing cluster only: leave it out, or set cluster.address"
    if config.cluster.runtime == "inline" and config.cluster.shared_memory_dir is not None:
        yield (
            "cluster.shared_memory_dir",
            "an inline run keeps its weights in its own memory: leave it out, or set cluster.runtime to ray",
        )
    own_transport = "." in config.cluster.transport
    is_inline, transport = config.cluster.runtime == "inline", config.cluster.transport
    if is_inline and transport not in ("auto", "memory") and not own_transport:
        yield "cluster.transport", "an inline run has no nodes: leave it out, or set cluster.runtime to ray"
    if transport == "memory" and not is_inline:
        yield (
            "cluster.transport",
            "memory works within one process: leave it out, or set cluster.runtime to inline",
        )
    if config.cluster.transport_options and not own_transport:
        yield (
            "cluster.transport_options",
            "are read only with a transport of your own: name it in cluster.transport, or leave them out",
        )
    rollout = config.rollout
    if rollout.progress_interval_s >= rollout.lost_after_s:
        yield (
            "rollout.progress_interval_s",
            f"must be less than rollout.lost_after_s {rollout.lost_after_s:g}, or healthy instances would "
            "count as lost",
        )


def _gpus(config: Config) -> Iterator[Problem]:
    placement, training = config.cluster.placement, config.training
    for part in ("rollout", "training", "evaluation"):
        gpus = getattr(placement, f"{part}_gpus") or 0
        if gpus > 1 and gpus % 1:
            yield (
                f"cluster.placement.{part}_gpus",
                "Ray assigns whole GPUs, or a share of one: set a whole number, or less than 1",
            )
    parallel, engine = config.rollout.vllm.tensor_parallel, config.rollout.engine
    for part, used in (("rollout", engine), ("evaluation", config.evaluation.engine or engine)):
        if used == "vllm" and 0 < (getattr(placement, f"{part}_gpus") or 0) < parallel > 1:
            yield (
                f"cluster.placement.{part}_gpus",
                f"rollout.vllm.tensor_parallel needs {parallel}: set that, or null",
            )
    ranks = training.deepspeed.ranks if training.trainer == "deepspeed" else 1
    if ranks > 1 and 0 < (placement.training_gpus or 0) <= 0.5 and training.deepspeed.backend != "gloo":
        yield (
            "cluster.placement.training_gpus",
            f"two of the {ranks} ranks could share a GPU, which NCCL refuses: set it to 1, or "
            "training.deepspeed.ranks to 1",
        )


def _coordination(config: Config) -> Iterator[Problem]:
    coordination = config.coordination
    policy = coordination.policy
    if policy == "one_step" and config.staleness.bound == 0:
        yield (
            "coordination.policy",
            "one_step generates one step ahead of training, which staleness.bound 0 forbids: "
            "set staleness.bound to 1 or more, or choose sync",
        )
    for part in ("routing", "synchronization", "migration"):
        section = getattr(coordination, part)
        if section.options and "." not in (section.strategy or ""):
            yield (
                f"coordination.{part}.options",
                f"are read only with a strategy of your own: name it in coordination.{part}.strategy, or "
                "leave them out",
            )
    if policy != "staleflow":
        for part in ("routing", "synchronization", "migration"):
            strategy = getattr(coordination, part).strategy
            if strategy is not None:
                yield (
                    f"coordination.{part}.strategy",
                    f"policy {policy} prescribes its own {part}: leave it null, or set coordination.policy "
                    "to staleflow",
                )


def _redundancy(config: Config) -> Iterator[Problem]:
    coordination = config.coordination
    if config.redundancy.groups == 0:
        return
    if coordination.policy != "staleflow":
        yield (
            "redundancy.groups",
            f"policy {coordination.policy} starts no spare groups: leave it at 0, or set coordination.policy "
            "to staleflow (redundancy.members works with every policy)",
        )
    elif coordination.routing.strategy == "naive":
        yield (
            "redundancy.groups",
            "naive routing starts no spare groups: leave it at 0, or set coordination.routing.strategy to "
            "waterfall",
        )


def _simulation(config: Config) -> Iterator[Problem]:
    simulation = config.simulation
    lengths, training = simulation.lengths, simulation.training
    if lengths.kind == "replay" and lengths.path is None:
        yield "simulation.lengths.path", "replay needs the folder of a run with a journal"
    if lengths.kind != "replay" and lengths.path is not None:
        yield (
            "simulation.lengths.path",
            "is read only with simulation.lengths.kind replay: set it, or leave it out",
        )
    if simulation.costs is not None:
        instances = config.rollout.instances
        for key in ("fixed_s", "token_s", "push_s"):
            if getattr(training, key) is None:
                yield (
                    f"simulation.training.{key}",
                    "with simulation.costs it cannot be derived from a model: set it",
                )
    else:
        parallel, gpus, together = simulation.tensor_parallel, simulation.rollout_gpus, ""
        if config.coordination.policy == "sync":  # all GPUs generate, then all train
            gpus += simulation.training_gpus
            together = f"together with simulation.training_gpus, {simulation.training_gpus}, it "
        instances = gpus // parallel
        if gpus % parallel:
            yield (
                "simulation.rollout_gpus",
                f"{together}is not a multiple of simulation.tensor_parallel {parallel}, the GPUs of one "
                "instance",
            )
    for key in ("outages", "slowdowns"):
        for change in getattr(simulation, key):
            if change.instance >= instances:
                yield (
                    f"simulation.{key}",
                    f"there is no instance {change.instance}: the {instances} instances are counted from 0",
                )


_CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _algorithm,
    _kl,
    _trainer,
    _sampling,
    _lengths,
    _evaluation,
    _data,
    _cluster,
    _gpus,
    _coordination,
    _redundancy,
    _simulation,
)
