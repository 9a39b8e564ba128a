"""Pads attention heads with zeros if they are smaller than vLLM's CPU kernels support.

Invariant: the widened model computes the same function. Each head gets extra dimensions in which queries,
keys and values are 0; rotary embedding covers only the old ones (`partial_rotary_factor`); queries are scaled
by sqrt(new / old), since attention divides by the square root of the head's width.

Only toy models have such heads. The model's projections must be named like Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Widening:
    """Widens each head from `old` to `new` dimensions."""

    old: int
    new: int

    def __call__(self, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
        """The widened model's version of the tensor called `name`."""
        match name.split(".")[-2:]:
            case [("q_proj" | "k_proj" | "v_proj") as projection, "weight" | "bias"]:
                wide = self._widened(tensor, 0)
                return (
                    wide * wide.dtype.type(math.sqrt(self.new / self.old)) if projection == "q_proj" else wide
                )
            case ["o_proj", "weight"]:
                return self._widened(tensor, 1)
        return tensor

    def _widened(self, tensor: NDArray[Any], axis: int) -> NDArray[Any]:
        """Append zeros to each head along `axis`."""
        shape = tensor.shape
        split = (*shape[:axis], shape[axis] // self.old, self.old, *shape[axis + 1 :])
        room = [(0, 0)] * len(split)
        room[axis + 1] = (0, self.new - self.old)
        joined = (*shape[:axis], shape[axis] // self.old * self.new, *shape[axis + 1 :])
        return np.pad(tensor.reshape(split), room).reshape(joined)


def widening(about: Mapping[str, Any], known: Sequence[int]) -> Widening | None:
    """How to widen a model with the config.json `about` for kernels that support the widths `known`.

    None: it needs no widening, or cannot be widened; in that case vLLM reports the problem.
    """
    heads = about.get("num_attention_heads")
    width = about.get("head_dim") or (about.get("hidden_size", 0) // heads if heads else 0)
    wider = min((size for size in known if size > width), default=None)
    rotary = about.get("rope_parameters") or {}
    plain = rotary.get("rope_type", "default") == "default" and "partial_rotary_factor" not in rotary
    if not width or width in known or wider is None or not plain or about.get("model_type") != "llama":
        return None
    return Widening(width, wider)


def widened_config(about: Mapping[str, Any], by: Widening) -> dict[str, Any]:
    """The config.json of the widened model."""
    rotary = {**(about.get("rope_parameters") or {}), "partial_rotary_factor": by.old / by.new}
    return {**about, "head_dim": by.new, "rope_parameters": rotary}
