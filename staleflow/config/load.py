"""Builds one checked Config from files, environment and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from staleflow.config.algorithms import ALGORITHMS
from staleflow.config.base import Section
from staleflow.config.checks import combination_problems
from staleflow.config.layers import default_layer, environment_layers, file_layer, merge, override_layers
from staleflow.config.problems import config_error, read_where, schema_problems
from staleflow.config.schema import Config
from staleflow.config.yaml_text import Layer, dump, parse


def load_config(
    paths: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    simulated: bool = False,
) -> Config:
    """The config of a run, from these layers (later ones win): defaults, defaults of its algorithm, config
    files, environment, overrides.

    `environ` None: no environment. `simulated`: for a run on simulated machines, which ignores some keys.
    Raises ConfigError that lists every problem found, one per line.
    """
    own = merge(
        [
            *(file_layer(path) for path in paths),
            *environment_layers(environ or {}),
            *override_layers(overrides),
        ]
    )
    defaults = default_layer()
    layer = merge([defaults, _algorithm_layer(merge([defaults, own])), own])
    try:
        config = Config.model_validate(layer.values)
    except ValidationError as error:
        raise config_error(schema_problems(Config, error, layer)) from None
    refused = combination_problems(config, simulated=simulated)
    if refused:
        lines = [
            f"{key}: {read_where(layer, tuple(key.split('.')), _value(config, key))}; {reason}"
            for key, reason in refused
        ]
        raise config_error(lines)
    return config


def _algorithm_layer(layer: Layer) -> Layer:
    """The defaults of the algorithm that the merged layers name; empty for an unknown one."""
    training = layer.values.get("training")
    name = training.get("algorithm") if isinstance(training, dict) else None
    if not isinstance(name, str) or name not in ALGORITHMS:
        return Layer(values={}, origins={})
    text = dump({"training": ALGORITHMS[name].defaults})
    return parse(text, name, origin=f"from the defaults of {name}")


def _value(config: Config, key: str) -> Any:
    value: Any = reduce(getattr, key.split("."), config)
    if isinstance(value, tuple):
        return [item.model_dump() if isinstance(item, Section) else item for item in value]
    return value
