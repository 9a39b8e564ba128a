"""Attention heads that are smaller than the smallest which vLLM's CPU kernels know, made wider by zeros.

Invariant: the widened model computes the same function. Each head gets dimensions that queries, keys and
values leave at 0; rotary embedding goes on over the old ones (`partial_rotary_factor`); queries are scaled by
sqrt(new / old), since attention divides by the root of the head's width.

Only toy models have such heads. It works for those whose projections are called as Llama's are.
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
    """From so many dimensions of a head to so many."""

    old: int
    new: int

    def __call__(self, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
        """The tensor of that name as the widened model has it."""
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
        """Zeros behind each head along `axis`."""
        shape = tensor.shape
        split = (*shape[:axis], shape[axis] // self.old, self.old, *shape[axis + 1 :])
        room = [(0, 0)] * len(split)
        room[axis + 1] = (0, self.new - self.old)
        joined = (*shape[:axis], shape[axis] // self.old * self.new, *shape[axis + 1 :])
        return np.pad(tensor.reshape(split), room).reshape(joined)


def widening(about: Mapping[str, Any], known: Sequence[int]) -> Widening | None:
    """How a model with this config.json must be widened for kernels that know these widths; None: not at all.

    None as well for a model that cannot be: vLLM then says what it lacks.
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
