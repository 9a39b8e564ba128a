"""The cost model's file: what `staleflow profile` writes and configs name. JSON, made to be read by people.

Invariants: what is read is a whole and valid cost model or an error that says what is wrong; a file is never
overwritten unless that was asked for, and a half-written one never takes another's place.

`model` holds the constants (seconds; see `coordination.cost_model`) and is all that is needed; the rest of
the file says where they come from.
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
"""Constants that a file may leave out."""


def load_cost_model(path: Path) -> CostModel:
    """The constants in a file. Raises ConfigError: unreadable, another format, or values that cannot be."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _not_one(path, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise _not_one(path, f"is not JSON ({error})") from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise _not_one(path, 'has no "model" with the constants')
    names = [field.name for field in fields(CostModel)]
    unknown = sorted(set(model) - set(names))
    missing = [name for name in names if name not in model and name not in _OPTIONAL]
    if unknown or missing:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has an unknown {', '.join(unknown)}"] if unknown else []
        raise _not_one(path, " and ".join(what) + f" (its constants are {', '.join(names)})")
    values = {**_OPTIONAL, **model}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise _not_one(path, f"has {name} = {json.dumps(value)}, which must be a number of at least 0")
    if max(values["k2"], values["k3"]) + values["k4"] <= 0:
        raise _not_one(path, "says that a step takes no time: k4, or k2 or k3, must be above 0")
    return CostModel(**values)


def _not_one(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the cost model {str(path)!r} {what}: name a file that `staleflow profile` wrote")


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a place where the file cannot or should not go. Raises UserError."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it with --output")
    if path.exists() and not force:
        raise UserError(f"{path} exists: choose another --output, or give --force to replace it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: make it, or choose another --output")


def save_cost_model(path: Path, model: CostModel, about: Mapping[str, Any], *, force: bool = False) -> None:
    """Write the constants, and `about` beside them (JSON values). Raises UserError as `check_target` does."""
    check_target(path, force=force)
    text = json.dumps({"model": asdict(model), **about}, indent=1, allow_nan=False) + "\n"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
