"""YAML with the scalars of YAML 1.2, and the place of every value.

PyYAML reads YAML 1.1, where `1e-4` is a string, `off` is false, `010` is eight and `1:30` is ninety. Here
the scalars are those of YAML 1.2's core schema: true/false, null, decimal and hexadecimal integers, floats
with or without a point; everything else is a string. Duplicate keys, keys that are not strings and more
than one document are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from staleflow.errors import ConfigError

Path = tuple[str, ...]
"""A key path. Elements of lists are named by their index."""

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map")}
"""The types allowed in a config; a value of any other type has another tag and is refused."""


class _Loader(yaml.SafeLoader):
    """SafeLoader without the implicit types of YAML 1.1."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own declaration)


_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One source of values, with the origin of each."""

    values: Any
    """For a config file: a mapping."""
    origins: dict[Path, str]
    """Key path in `values` -> the text that follows "read 2" in messages, such as "from a.yaml:3"."""


def parse(text: str, name: str, *, origin: str | None = None) -> Layer:
    """Read one YAML document.

    `name` appears in messages; `origin` replaces "from <name>:<line>" for every value. Raises ConfigError.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        reader = _Reader(loader, name, origin)
        return Layer(values=None if node is None else reader.read(node, ()), origins=reader.origins)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and origin is None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: not usable YAML: it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


class _Reader:
    """Turns nodes into values and records the origin of each."""

    def __init__(self, loader: _Loader, name: str, origin: str | None) -> None:
        self._loader = loader
        self._name = name
        self._origin = origin
        self._open: set[int] = set()
        self.origins: dict[Path, str] = {}

    def read(self, node: yaml.Node, path: Path) -> Any:
        place = f"{self._name}:{node.start_mark.line + 1}"
        self.origins[path] = self._origin or f"from {place}"
        if node.tag not in _TAGS:
            raise ConfigError(f"{place}: the tag {node.tag.replace(_TAG, '!!')} is not allowed in a config")
        if id(node) in self._open:
            raise ConfigError(f"{place}: a value contains itself")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, str(i))) for i, item in enumerate(node.value)]
            return self._scalar(node, place)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node, "") if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise ConfigError(f"{self._name}:{line}: the key {key_node.value!r} is not a name")
            if key in seen:
                where = ".".join((*path, key))
                raise ConfigError(f"{self._name}:{line}: {where} is given twice, first in line {seen[key]}")
            seen[key] = line
        return {key: self.read(value, (*path, key)) for key, (_, value) in zip(seen, node.value, strict=True)}

    def _scalar(self, node: yaml.Node, place: str) -> Any:
        try:
            if node.tag == f"{_TAG}int":  # PyYAML would read 010 as octal
                return int(node.value, 16 if node.value.startswith("0x") else 10)
            if node.tag == f"{_TAG}float":
                return float(re.sub(r"\.(?=inf|Inf|INF|nan|NaN|NAN)", "", node.value))
            return self._loader.construct_object(node)
        except (ValueError, KeyError) as error:  # the text does not fit its explicit tag
            raise ConfigError(
                f"{place}: {node.value!r} is not a valid {node.tag.removeprefix(_TAG)}"
            ) from error


class _Dumper(yaml.SafeDumper):
    """Writes text that YAML 1.1 and 1.2 readers read as the same values."""


for _tag, _pattern in ((f"{_TAG}int", _INT), (f"{_TAG}float", _FLOAT)):
    # Quote strings such as "1e-4" that only one of the two dialects reads as numbers.
    _Dumper.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern.pattern})$"), None)


_BREAKS = re.compile(r"[\x85\u2028\u2029]")
"""YAML's line breaks other than the newline: only double quotes preserve them."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def dump(values: Any) -> str:
    """Values as block-style YAML, in the given order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def dump_scalar(value: Any) -> str:
    """One value as written after `key: `."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return str(text).removesuffix("...\n").strip()
