"""What is looked up by name before anything starts: parts of the user's own, engines, cost models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from staleflow.config.algorithms import ALGORITHMS
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.registry import load_named
from staleflow.runtime.assembly.control import build_costs
from staleflow.runtime.assembly.engines import fake_costs
from staleflow.runtime.assembly.scoring import evaluating
from staleflow.runtime.assembly.training import check_deepspeed

if TYPE_CHECKING:
    pass


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
    fake_costs(config)
