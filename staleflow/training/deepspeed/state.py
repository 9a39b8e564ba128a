"""Optimizer state by parameter, independent of the ZeRO stage.

One interface for three kinds of storage. A *key* is `exp_avg` or `exp_avg_sq` (Adam's two moments), or None
(the float32 weights that the optimizer updates). All ranks call `read` and `write` for the same parameter;
whole tensors are flat, float32 and on the CPU, and exist on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from staleflow.training.deepspeed.model_shard import ModelShard

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState(Protocol):
    """See the module."""

    def read(self, parameter: Any, key: str | None) -> Tensor:
        """The whole state of one parameter on rank 0; undefined on other ranks."""
        ...

    def write(self, parameter: Any, key: str | None, value: Tensor) -> None:
        """Set this rank's part of one parameter's state from the whole state, given to every rank."""
        ...

    def prepare(self, updates: int) -> None:
        """Allocate the moments, as after `updates` updates."""
        ...

    def finish(self) -> None:
        """Copy the float32 weights that were written into the model."""
        ...


def state_of(rank: ModelShard) -> OptimizerState:
    """The storage of the rank's engine."""
    if rank.settings.zero_stage == 3:
        return _Sharded(rank)
    if rank.settings.zero_stage == 0:
        return _Whole(rank)
    return _Split(rank)


def broadcast(value: Tensor | None, numel: int, group: dist.ProcessGroup) -> Tensor:
    """Rank 0's tensor, flat, on every rank."""
    flat = torch.empty(numel) if value is None else value.detach().float().cpu().reshape(-1).contiguous()
    dist.broadcast(flat, src=0, group=group)
    return flat


def _set_steps(optimizer: Any, flats: Sequence[Tensor], updates: int) -> None:
    for flat in flats:
        optimizer.state[flat] = {"step": torch.tensor(float(updates))} | {
            key: torch.zeros_like(flat) for key in MOMENTS
        }


class _Whole:
    """Stage 0, float32: every rank holds everything."""

    def __init__(self, rank: ModelShard) -> None:
        self._optimizer = rank.engine.optimizer

    def read(self, parameter: Any, key: str | None) -> Tensor:
        return self._state(parameter, key).detach().cpu().reshape(-1)

    def write(self, parameter: Any, key: str | None, value: Tensor) -> None:
        state = self._state(parameter, key)
        state.data.copy_(value.view(state.shape))

    def prepare(self, updates: int) -> None:
        _set_steps(self._optimizer, [p for g in self._optimizer.param_groups for p in g["params"]], updates)

    def finish(self) -> None:
        """Nothing to do: `write` changes the model's weights in place."""

    def _state(self, parameter: Any, key: str | None) -> Tensor:
        found: Tensor = parameter if key is None else self._optimizer.state[parameter][key]
        return found


class _Split:
    """Stages 1 and 2: each rank holds a slice of all parameters concatenated."""

    def __init__(self, rank: ModelShard) -> None:
        self._outer = rank.engine.optimizer
        self._rank = rank
        flats = getattr(self._outer, "single_partition_of_fp32_groups", None)
        self._flats = self._outer.fp32_groups_flat_partition if flats is None else flats

    def read(self, parameter: Any, key: str | None) -> Tensor:
        found: Tensor = parameter.get_full_hp_param(key)
        return found.detach().float().cpu().reshape(-1)

    def write(self, parameter: Any, key: str | None, value: Tensor) -> None:
        parameter.set_full_hp_param(value.view(parameter.shape), key)

    def prepare(self, updates: int) -> None:
        _set_steps(self._outer.optimizer, self._flats, updates)
        self._outer._hp_optimizer_states_linked = False
        self._outer._lazy_init_hp_params_optimizer_state()

    def finish(self) -> None:
        self._outer.update_lp_params()


class _Sharded:
    """Stage 3: each rank holds a slice of each parameter; the last slice is padded."""

    def __init__(self, rank: ModelShard) -> None:
        self._outer = rank.engine.optimizer
        self._rank = rank

    def _part(self, parameter: Any, key: str | None) -> Tensor:
        part: Tensor
        part, _ = self._outer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=True, optim_state_key=key
        )
        return part

    def read(self, parameter: Any, key: str | None) -> Tensor:
        whole = self._rank.collect(self._part(parameter, key).float(), self._rank.groups.talk)
        return whole[: parameter.ds_numel]

    def write(self, parameter: Any, key: str | None, value: Tensor) -> None:
        part = self._part(parameter, key)
        mine = value[part.numel() * self._rank.rank :][: part.numel()]
        part.data[: mine.numel()].copy_(mine)

    def prepare(self, updates: int) -> None:
        _set_steps(self._outer.optimizer, self._outer.fp32_partitioned_groups_flat, updates)

    def finish(self) -> None:
        self._outer._partition_all_parameters()
        for number in range(len(self._outer.fp16_groups)):
            self._outer._reassign_or_swap_out_partitioned_parameters(number)
        if persistent := self._outer.persistent_parameters:
            persistent[0].all_gather(persistent)
