"""Checks of what a config names: parts of the user's own, optional packages, models and cost files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from staleflow.config.algorithms import ALGORITHMS, traits
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.registry import load_named
from staleflow.reward.verifiers import load_verifier
from staleflow.runtime.assembly.control import build_costs, build_policy
from staleflow.runtime.assembly.engines import fake_costs
from staleflow.runtime.assembly.environments import build_environment
from staleflow.runtime.assembly.scoring import evaluating
from staleflow.runtime.assembly.training import check_deepspeed
from staleflow.telemetry.sinks import SINKS
from staleflow.training.models import model_folder
from staleflow.training.smollm2 import DEFAULT_FOLDER

PartCheck = tuple[str, Callable[[], object]]
"""The config key that is checked, and a function that raises ConfigError."""


def part_checks(config: Config) -> Iterator[PartCheck]:
    """One check for each part that the config names and that can be looked up without building it."""
    training = config.training
    for key, engine in _engines(config):
        if engine == "vllm":
            from staleflow.rollout.vllm.options import check_vllm

            yield key, partial(check_vllm, config.rollout.vllm.options)
        elif engine not in ("torch", "fake"):
            yield key, partial(_check_callable, "rollout engine", engine)
    if training.trainer == "deepspeed":
        yield "training.trainer", check_deepspeed
    elif training.trainer != "torch":
        yield "training.trainer", partial(_check_callable, "trainer", training.trainer)
    if training.algorithm not in ALGORITHMS:
        yield "training.algorithm", partial(_check_algorithm, training.algorithm, training.trainer)
    if "." in config.cluster.transport:
        yield "cluster.transport", partial(_check_callable, "cluster.transport", config.cluster.transport)
    for number, sink in enumerate(config.telemetry.sinks):
        key = f"telemetry.sinks[{number}].name"
        yield key, partial(load_named, key, sink.name, SINKS)
    yield "environment.name", partial(build_environment, config)
    yield "reward.verifier", partial(load_verifier, config.reward.verifier)
    for key, folder, is_read in (
        ("model.source", config.model.source, True),
        ("training.kl.reference", training.kl.reference, training.kl.coefficient > 0),
        ("training.critic.source", training.critic.source, traits(training.algorithm).critic),
    ):
        if folder is not None and is_read:
            yield key, partial(_check_model, key, folder)
    if config.model.tokenizer is not None:
        yield "model.tokenizer", partial(_check_tokenizer, config.model.tokenizer)
    yield from coordination_checks(config)
    yield "rollout.fake.cost_model", partial(fake_costs, config)


def coordination_checks(config: Config) -> Iterator[PartCheck]:
    """Those of them that concern simulated runs and plans as well."""
    yield "coordination", partial(build_policy, config)
    yield "coordination.cost_model", partial(build_costs, config)


def _engines(config: Config) -> Iterator[tuple[str, str]]:
    """Each engine once, with the key that names it."""
    rollout, evaluation = config.rollout.engine, evaluating(config).rollout.engine
    yield "rollout.engine", rollout
    if evaluation != rollout and config.evaluation.every:
        yield "evaluation.engine", evaluation


def _check_callable(kind: str, name: str) -> None:
    if not callable(load_named(kind, name, {})):
        raise ConfigError(f"{kind} {name!r} is neither a class nor a function: name one that builds it")


def _check_algorithm(name: str, trainer: str) -> None:
    from staleflow.training.algorithms import load_algorithm

    if load_algorithm(name).critic and trainer == "deepspeed":
        raise ConfigError(
            f"training.algorithm {name!r} has a critic, which only the torch trainer trains: "
            "set training.trainer to torch"
        )


def _check_model(key: str, source: str) -> None:
    try:
        model_folder(source)
    except ConfigError as error:
        is_ours = Path(source).expanduser() == Path(DEFAULT_FOLDER).expanduser()
        hint = " `staleflow model smollm2` makes that folder." if is_ours else ""
        raise ConfigError(f"{key}: {error}{hint}") from None


def _check_tokenizer(folder: str) -> None:
    if not Path(folder).expanduser().is_dir():
        raise ConfigError(f"model.tokenizer: the tokenizer folder {folder!r} does not exist")
