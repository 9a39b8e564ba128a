"""What is looked up by name before anything starts: parts of the user's own, engines, cost models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

from staleflow.config.algorithms import ALGORITHMS, traits
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.registry import load_named
from staleflow.reward.verifiers import load_verifier
from staleflow.runtime.assembly.control import build_costs
from staleflow.runtime.assembly.engines import fake_costs
from staleflow.runtime.assembly.scoring import evaluating
from staleflow.runtime.assembly.training import check_deepspeed
from staleflow.training.models import model_folder

Check = Callable[[], object]
"""Raises ConfigError."""


def check_own_parts(config: Config) -> None:
    """Load what dotted paths and cost models name, before anything starts. Raises ConfigError."""
    for _, check in (*_packages(config), *_named(config)):
        check()


def own_part_problems(config: Config) -> Iterator[str]:
    """All that `check_own_parts` refuses, but for packages that are not installed."""
    for package, check in (*_packages(config), *_named(config)):
        if package is not None and importlib.util.find_spec(package) is None:
            continue
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _engines(config: Config) -> list[str]:
    return list(dict.fromkeys((config.rollout.engine, evaluating(config).rollout.engine)))


def _packages(config: Config) -> Iterator[tuple[str | None, Check]]:
    if "vllm" in _engines(config):
        from staleflow.rollout.vllm.options import check_vllm

        yield "vllm", partial(check_vllm, config.rollout.vllm.options)
    if config.training.trainer == "deepspeed":
        yield "deepspeed", check_deepspeed


def _named(config: Config) -> Iterator[tuple[str | None, Check]]:
    training = config.training
    for engine in _engines(config):
        if engine not in ("torch", "vllm", "fake"):
            yield None, partial(_check_callable, "rollout engine", engine)
    if training.trainer not in ("torch", "deepspeed"):
        yield None, partial(_check_callable, "trainer", training.trainer)
    if training.algorithm not in ALGORITHMS:
        from staleflow.training.algorithms import load_algorithm

        yield None, partial(load_algorithm, training.algorithm)
    yield None, partial(load_verifier, config.reward.verifier)
    for key, folder, read in (
        ("training.kl.reference", training.kl.reference, training.kl.coefficient > 0),
        ("training.critic.source", training.critic.source, traits(training.algorithm).critic),
    ):
        if folder is not None and read:
            yield None, partial(_check_model, key, folder)
    yield None, partial(build_costs, config)
    yield None, partial(fake_costs, config)


def _check_callable(kind: str, name: str) -> None:
    if not callable(load_named(kind, name, {})):
        raise ConfigError(f"{kind} {name!r} is neither a class nor a function: name one that builds it")


def _check_model(key: str, source: str) -> None:
    try:
        model_folder(source)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
