"""Layers of config values, merged from left to right.

Invariants: maps merge deeply; everything else, lists included, is replaced; each value in the result has its
origin; nothing here depends on the schema.

Order: default.yaml, config files as given, environment (STALEFLOW__SECTION__KEY=value), overrides
(key.path=value) as given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import staleflow
from staleflow.config.yaml_text import Layer, Path, parse
from staleflow.errors import ConfigError

ENVIRONMENT_PREFIX = "STALEFLOW__"
_ENVIRONMENT_FORM = "write STALEFLOW__SECTION__KEY, as in STALEFLOW__STALENESS__BOUND=2"

STANDARD_INPUT = FilePath("/dev/stdin")

_OVERRIDE = re.compile(r"(?P<key>[^\W\d][\w-]*(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)


def split_arguments(arguments: Iterable[str]) -> tuple[list[FilePath], list[str]]:
    """Sort command-line arguments into config files and `key.path=value` overrides.

    An argument of the form `key.path=value` is an override unless a file of that name exists; `-` is standard
    input. Raises ConfigError for an argument that is neither.
    """
    files: list[FilePath] = []
    overrides: list[str] = []
    for argument in arguments:
        if argument == "-":
            files.append(STANDARD_INPUT)
        elif _is_readable(argument):
            files.append(FilePath(argument))
        elif _OVERRIDE.fullmatch(argument):
            overrides.append(argument)
        elif "=" in argument and not argument.endswith((".yaml", ".yml")):
            raise ConfigError(f"{argument!r} is not an override: write key.path=value")
        else:
            raise ConfigError(
                f"there is no config file {argument!r}; to override a key, write key.path=value, "
                "as in staleness.bound=2"
            )
    return files, overrides


def _is_readable(argument: str) -> bool:
    """Whether this file exists; a pipe counts, as in `staleflow run <(...)`."""
    try:
        return FilePath(argument).exists() and not FilePath(argument).is_dir()
    except OSError:  # the name is too long
        return False


def default_layer() -> Layer:
    """The defaults: configs/default.yaml inside the package, or beside it in a checkout."""
    package = FilePath(staleflow.__file__).parent
    installed = package / "configs" / "default.yaml"
    checkout = package.parent / "configs" / "default.yaml"
    return file_layer(installed if installed.is_file() else checkout, origin="by default")


def file_layer(path: FilePath, *, origin: str | None = None) -> Layer:
    """The values of one YAML file; `origin` as in `parse`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}") from error
    layer = parse(text, str(path), origin=origin)
    if layer.values is None:
        return Layer(values={}, origins={})
    if not isinstance(layer.values, dict):
        raise ConfigError(f"{path}: a config file must be a map of sections")
    return layer


def environment_layers(environ: Mapping[str, str]) -> list[Layer]:
    """A layer for each variable STALEFLOW__SECTION__KEY; names are not case-sensitive.

    Raises ConfigError for a name that is almost right, which would otherwise be ignored silently.
    """
    layers = []
    for name in sorted(environ):
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            key = tuple(name[len(ENVIRONMENT_PREFIX) :].lower().split("__"))
            if not all(key):
                raise ConfigError(f"the environment variable {name} does not name a key: {_ENVIRONMENT_FORM}")
            layers.append(_value_layer(key, environ[name], name, f"from the environment variable {name}"))
        elif name.upper().startswith("STALEFLOW_") and "__" in name:
            raise ConfigError(f"the environment variable {name} is not a config key: {_ENVIRONMENT_FORM}")
    return layers


def override_layers(overrides: Sequence[str], origin: str = "from the command line") -> list[Layer]:
    """A layer for each `key.path=value`. Raises ConfigError for any other text."""
    layers = []
    for text in overrides:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not an override: write key.path=value, as in staleness.bound=2")
        layers.append(_value_layer(tuple(match["key"].split(".")), match["value"], match["key"], origin))
    return layers


def merge(layers: Iterable[Layer]) -> Layer:
    """All layers merged into one; later layers win."""
    values: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for layer in layers:
        _merge_into(values, origins, layer, layer.values, ())
    return Layer(values=values, origins=origins)


def _value_layer(key: Path, text: str, name: str, origin: str) -> Layer:
    """One value at one key path."""
    value = parse(text, name, origin=origin)
    nested = value.values
    for part in reversed(key):
        nested = {part: nested}
    origins = {key[:n]: origin for n in range(len(key) + 1)}
    return Layer(values=nested, origins=origins | {(*key, *path): o for path, o in value.origins.items()})


def _merge_into(
    target: dict[str, Any], origins: dict[Path, str], layer: Layer, new: dict[str, Any], path: Path
) -> None:
    for key, value in new.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], origins, layer, value, here)
            continue
        for old in [p for p in origins if p[: len(here)] == here]:
            del origins[old]
        origins.update({p: o for p, o in layer.origins.items() if p[: len(here)] == here})
        target[key] = _copied(value)


def _copied(value: Any) -> Any:
    """A copy that later layers may change; aliased YAML nodes and the layers themselves must not change."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list) else value
