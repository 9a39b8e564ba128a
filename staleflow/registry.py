"""Names to code: the small registries, each of which a dotted path extends.

Invariants:

- a registry is a plain mapping from a short name to a dotted path; nothing is imported before it is
  asked for;
- a name that is neither known nor a dotted path, and a path that cannot be loaded, is a ConfigError that says
  what failed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from staleflow.errors import ConfigError
from staleflow.suggestions import did_you_mean


def load_named(kind: str, name: str, known: Mapping[str, str]) -> Any:
    """The object that `name` stands for: a key of `known`, or a dotted path `package.module.attribute`.

    `kind` is what the thing is called in messages, e.g. "verifier". Raises ConfigError.
    """
    path = known.get(name, name)
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        meant = did_you_mean(name, known)
        raise ConfigError(
            f"unknown {kind} {name!r}: use one of {', '.join(sorted(known))} or a dotted path"
            f" such as my_package.my_module.my_function{meant and f'; {meant}'}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises on import is the user's to see
        absent = isinstance(error, ModuleNotFoundError)
        raise ConfigError(
            f"{kind} {name!r} cannot be loaded: importing {module_name} failed with"
            f" {type(error).__name__}: {error}"
            f"{'; install it, or name its folder in PYTHONPATH' if absent else ''}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{kind} {name!r} cannot be loaded: module {module_name} has no {attribute!r}"
        ) from None


def make_named(
    key: str, name: str, known: Mapping[str, str], options: Mapping[str, Any], methods: Sequence[str]
) -> Any:
    """What the class or function that `name` stands for makes of `options`, its keyword arguments.

    `key` is the config key that names it; its options stand beside it. Raises ConfigError when it cannot be
    made, or when what it makes lacks one of `methods`.
    """
    make = load_named(key, name, known)
    try:
        made = make(**options)
    except Exception as error:
        raise ConfigError(
            f"{key}: {name!r} cannot be made with options {dict(options)}: {type(error).__name__}: {error}"
        ) from error
    lacking = [method for method in methods if not callable(getattr(made, method, None))]
    if lacking:
        raise ConfigError(
            f"{key}: {name!r} makes a {type(made).__name__}, which has no method {lacking[0]!r}"
        )
    return made
