"""The cost model's file, written by `staleflow profile` and named in configs. Readable JSON.

Invariants: reading gives a complete and valid cost model, or an error that names the problem; a file is
overwritten only on request, and never by a half-written one.

`model` holds the constants (in seconds; see `coordination.cost_model`). Only `model` is required; the rest of
the file documents where the constants come from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from staleflow.coordination.cost_model import CostModel
from staleflow.errors import ConfigError, UserError

_OPTIONAL = {"pull": 0.0}
"""Constants that a file may omit, with their defaults."""


def load_cost_model(path: Path) -> CostModel:
    """The constants in a file. Raises ConfigError: unreadable, wrong format, or impossible values."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _invalid(path, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise _invalid(path, f"is not JSON ({error})") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise _invalid(path, 'has no "model" with the constants')
    names = [field.name for field in fields(CostModel)]
    unknown = sorted(set(model) - set(names))
    missing = [name for name in names if name not in model and name not in _OPTIONAL]
    if unknown or missing:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has an unknown {', '.join(unknown)}"] if unknown else []
        raise _invalid(path, " and ".join(problems) + f" (the constants are {', '.join(names)})")
    values = {**_OPTIONAL, **model}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise _invalid(path, f"has {name} = {json.dumps(value)}, which must be a number of at least 0")
    if max(values["k2"], values["k3"]) + values["k4"] <= 0:
        raise _invalid(path, "gives a step no duration (k2, k3 or k4 must be above 0)")
    return CostModel(**values)


def _invalid(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"the cost model {str(path)!r} {problem}: name a file that `staleflow profile` wrote")


def check_target(path: Path, *, force: bool) -> None:
    """Check that the file can be written at `path`. Raises UserError."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it with --output")
    if path.exists() and not force:
        raise UserError(f"{path} exists: choose another --output, or give --force to replace it")
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist: create it, or choose another --output")


def save_cost_model(path: Path, model: CostModel, about: Mapping[str, Any], *, force: bool = False) -> None:
    """Write the constants and the entries of `about` (JSON values). Raises UserError like `check_target`."""
    check_target(path, force=force)
    text = json.dumps({"model": asdict(model), **about}, indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
