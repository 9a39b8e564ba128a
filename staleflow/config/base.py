"""Shared by all sections of the schema: strictness, and names that may also be dotted paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from staleflow.config.algorithms import ALGORITHMS

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Section(BaseModel):
    """A part of the config. Strict, closed, finite, frozen."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


class UnknownName(ValueError):
    """A name that is neither one of `known` nor a dotted path."""

    def __init__(self, known: tuple[str, ...], prefix: str | None) -> None:
        names = [*known, f"{prefix}:<task>"] if prefix else list(known)
        super().__init__(f"allowed: {', '.join(names)}, or a dotted path such as my_package.my_name")
        self.known = known


def _name_or_dotted_path(known: tuple[str, ...], prefix: str | None = None) -> Callable[[str], str]:
    """A validator: a registered name, `<prefix>:<something>`, or a dotted path to the user's own."""

    def check(value: str) -> str:
        if value in known or _DOTTED_PATH.fullmatch(value):
            return value
        if prefix and value.startswith(f"{prefix}:") and len(value) > len(prefix) + 1:
            return value
        raise UnknownName(known, prefix)

    return check


EnvironmentName = Annotated[str, AfterValidator(_name_or_dotted_path(("single_turn", "scripted_turns")))]
RoutingName = Annotated[str, AfterValidator(_name_or_dotted_path(("waterfall", "naive")))]
SynchronizationName = Annotated[str, AfterValidator(_name_or_dotted_path(("selective", "naive")))]
MigrationName = Annotated[str, AfterValidator(_name_or_dotted_path(("cost_aware", "naive")))]
TransportName = Annotated[
    str, AfterValidator(_name_or_dotted_path(("auto", "shared_memory", "object_store", "device", "memory")))
]
SinkName = Annotated[str, AfterValidator(_name_or_dotted_path(("jsonl",)))]
EngineName = Annotated[str, AfterValidator(_name_or_dotted_path(("torch", "vllm", "fake")))]
AlgorithmName = Annotated[str, AfterValidator(_name_or_dotted_path(tuple(ALGORITHMS)))]
TrainerName = Annotated[str, AfterValidator(_name_or_dotted_path(("torch", "deepspeed")))]
VerifierName = Annotated[
    str, AfterValidator(_name_or_dotted_path(("exact_match", "reasoning_gym", "math_verify")))
]
SourceName = Annotated[
    str, AfterValidator(_name_or_dotted_path(("sums", "jsonl", "parquet"), prefix="reasoning_gym"))
]
