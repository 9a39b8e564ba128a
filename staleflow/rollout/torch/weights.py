"""Copies weights into a model in place.

Invariant: all or nothing. Every name, shape and type is checked before the first byte is copied, so a refused
swap leaves the old weights intact. A tied weight (one storage under several names, such as input and output
embeddings) may be given under one of its names, several or all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from staleflow.errors import EngineError


def copy_into(model: torch.nn.Module, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Copy `tensors`, by state-dict name, over the weights of `model`.

    The arrays may be read-only and are not kept. Raises EngineError, changing nothing, for an unknown or
    missing name, a different shape, a type that is not numeric, or unequal tied weights.
    """
    targets = model.state_dict()
    _check_names(targets, tensors)
    copied: dict[tuple[int, torch.Size], str] = {}
    for name, array in tensors.items():
        _check_array(name, array, targets[name])
        twin = copied.setdefault(_storage(targets[name]), name)
        if twin != name and not np.array_equal(array, tensors[twin]):
            raise EngineError(f"{name} and {twin} are tied in this model but have different values")
    with torch.no_grad():
        for name in copied.values():
            _copy(targets[name], tensors[name])


def _check_names(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, NDArray[Any]]) -> None:
    unknown = sorted(set(tensors) - set(targets))
    if unknown:
        raise EngineError(f"the model has no weights named {_listed(unknown)}")
    given = {_storage(targets[name]) for name in tensors}
    missing = sorted(name for name, target in targets.items() if _storage(target) not in given)
    if missing:
        raise EngineError(f"the new weights lack {_listed(missing)}")


def _check_array(name: str, array: NDArray[Any], target: torch.Tensor) -> None:
    if tuple(array.shape) != tuple(target.shape):
        raise EngineError(f"{name} has shape {tuple(array.shape)}, the model's is {tuple(target.shape)}")
    if array.dtype.kind not in "fiub":
        raise EngineError(f"{name} has type {array.dtype}, which is not numeric")


def _copy(target: torch.Tensor, array: NDArray[Any]) -> None:
    if target.device.type == "cpu" and target.dtype != torch.bfloat16:
        # Copy with numpy: torch would warn about read-only arrays, which leases provide.
        np.copyto(target.detach().numpy(), array, casting="unsafe")
    else:
        target.copy_(torch.tensor(array))


def _storage(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    # Weights without elements all have address 0: the shape distinguishes them.
    return tensor.data_ptr(), tensor.shape


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
