"""Checks weights by name and shape before vLLM gets them.

vLLM itself only logs what an update lacks and keeps decoding with the old values: at the start, noise.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from staleflow.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight in the safetensors files of a model folder (reads only their headers)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    return shapes


def check_shapes(tensors: Mapping[str, NDArray[Any]], stored: Shapes, *, tied: bool) -> None:
    """Raise EngineError if `tensors` are not the weights of the model.

    `tied`: one of two tied weights may be missing on either side.
    """
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in given.items():
        if name in stored and stored[name] != shape:
            raise EngineError(f"{name} has shape {shape}, the model's is {stored[name]}")
    missing, unknown = sorted(stored.keys() - given.keys()), sorted(given.keys() - stored.keys())
    allowed = 1 if tied else 0
    if len(missing) > allowed:
        raise EngineError(f"the new weights lack {', '.join(missing[:3])}")
    if len(unknown) > allowed:
        raise EngineError(f"the model has no weights named {', '.join(unknown[:3])}")
