"""Config errors that say how to fix them.

Each problem is one line: the key path, the value and where it was read, what is allowed, the nearest valid
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import reduce
from types import NoneType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from staleflow.config.base import Section, UnknownName
from staleflow.config.key_names import key_paths, suggestion
from staleflow.config.yaml_text import Layer, Path, dump_scalar
from staleflow.errors import ConfigError
from staleflow.suggestions import did_you_mean

_LONGEST_VALUE = 60
"""Most characters of a value that a message shows."""

_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like a number)",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "string_too_short": "text that is not empty",
}
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def config_error(problems: Sequence[str]) -> ConfigError:
    """All problems in one error, one per line."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the config:{lines}")


def schema_problems(model: type[Section], error: ValidationError, layer: Layer) -> list[str]:
    """The problems that pydantic found in the merged `layer`."""
    return [_problem(model, details, layer) for details in error.errors(include_url=False)]


def read_where(layer: Layer, path: Path, value: Any) -> str:
    """`read 2 from a.yaml:3`, or `read 2` when the place is unknown."""
    text = dump_scalar(value)
    shown = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    origin = _origin(layer, path)
    return f"read {shown} {origin}" if origin else f"read {shown}"


def _problem(model: type[Section], details: ErrorDetails, layer: Layer) -> str:
    path = tuple(str(part) for part in details["loc"])
    value = details["input"]
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unknown_key(model, path, value, layer)
    if path[-1] == "[key]":  # a map with a fixed set of keys
        return _unknown_in_map(path[:-1], details["ctx"]["expected"], layer)
    name = ".".join(path)
    if kind == "missing":
        # Every key outside lists has a default, so the key is in a list element, or the list is too short.
        missing = f"a map that has {path[-1]}" if isinstance(value, dict) else "a longer list"
        return f"{'.'.join(path[:-1])}: {read_where(layer, path[:-1], value)}; allowed: {missing}"
    fields = dict(key_paths(model))
    allowed, hint = _allowed(details, fields.get(path))
    return f"{name}: {read_where(layer, path, value)}; allowed: {allowed}{hint and f'; {hint}'}"


def _unknown_key(model: type[Section], path: Path, value: Any, layer: Layer) -> str:
    while isinstance(value, dict) and len(value) == 1:  # `stalness.bound=2`: report the whole key
        key, value = next(iter(value.items()))
        path = (*path, key)
    hint = _in_list(model, path) or suggestion(model, path)
    if not hint:
        siblings = [p[-1] for p, _ in key_paths(model) if p[:-1] == path[:-1]]
        section = f"section {'.'.join(path[:-1])}" if len(path) > 1 else "the config"
        hint = f"{section} has {', '.join(siblings)}" if siblings else "there is no such section"
    return f"{'.'.join(path)}: unknown key ({read_where(layer, path, value)}); {hint}"


def _unknown_in_map(path: Path, expected: str, layer: Layer) -> str:
    """`expected`: the known keys, as pydantic lists them."""
    known = re.findall(r"'(\w+)'", expected)
    value = reduce(lambda values, part: values[part], path, layer.values)
    hint = did_you_mean(path[-1], known) or f"{'.'.join(path[:-1])} has {', '.join(known)}"
    return f"{'.'.join(path)}: unknown key ({read_where(layer, path, value)}); {hint}"


def _in_list(model: type[Section], path: Path) -> str:
    """The keys of a list's elements, when `path` is in such an element; else ""."""
    if len(path) < 3 or not path[-2].isdigit():
        return ""
    field = dict(key_paths(model)).get(path[:-2])
    elements = [a for a in get_args(field.annotation) if isinstance(a, type)] if field else []
    keys = [key for element in elements if issubclass(element, Section) for key in element.model_fields]
    return f"an element of {'.'.join(path[:-2])} has {', '.join(keys)}" if keys else ""


def _allowed(details: ErrorDetails, field: FieldInfo | None) -> tuple[str, str]:
    """The allowed values of the field, and a hint or ""."""
    kind, context = details["type"], details.get("ctx", {})
    hint = ""
    if kind == "literal_error" and field is not None:
        choices = [str(choice) for choice in get_args(field.annotation)]
        allowed = ", ".join(choices)
        hint = did_you_mean(str(details["input"]), choices)
    elif kind in _LIMITS:
        words, key = _LIMITS[kind]
        allowed = f"{words} {json.dumps(context[key])}"
    elif kind == "value_error":
        allowed = str(context["error"]).removeprefix("allowed: ")
        if isinstance(context["error"], UnknownName):
            hint = did_you_mean(str(details["input"]), list(context["error"].known))
    elif kind == "too_long":
        allowed = f"a list of {context['max_length']}"
    else:
        allowed = _ALLOWED.get(kind, details["msg"])
    optional = field is not None and NoneType in get_args(field.annotation)
    return f"{allowed} or null" if optional else allowed, hint


def _origin(layer: Layer, path: Path) -> str:
    """The origin of the value at `path`, or of the nearest enclosing value with a known one."""
    for n in range(len(path), 0, -1):
        if path[:n] in layer.origins:
            return layer.origins[path[:n]]
    return ""
