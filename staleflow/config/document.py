"""The schema as commented YAML: the output of `staleflow config`, and the text of `configs/default.yaml`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args

from pydantic.fields import FieldInfo

from staleflow.config.base import Section
from staleflow.config.schema import Config
from staleflow.config.yaml_text import dump_scalar

_WIDTH = 100
_HEADER = """\
# Every key with its default: what a bare `staleflow run` uses.
# Change any of them with key.path=value on the command line, STALEFLOW__SECTION__KEY=value in the
# environment, or a file of your own that holds only what differs.
"""


def documented_defaults() -> str:
    """All keys of the schema with defaults and documentation."""
    return _HEADER + "\n".join(_section(Config(), 0)) + "\n"


def _section(section: Section, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            if depth == 0:
                yield ""
            yield from _comment((type(value).__doc__ or "").strip(), indent)
            yield f"{indent}{name}:"
            yield from _section(value, depth + 1)
        else:
            yield from _comment(_with_choices(field), indent)
            yield f"{indent}{name}: {dump_scalar(list(value) if isinstance(value, tuple) else value)}"


def _with_choices(field: FieldInfo) -> str:
    choices: list[Any] = [c for c in get_args(field.annotation) if isinstance(c, str)]
    optional = NoneType in get_args(field.annotation)
    text = " ".join((field.description or "").split())
    return f"{text} One of: {', '.join(choices)}." if len(choices) > 1 and not optional else text


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"
