"""One rank's part of the model: its engine, and the gathering of weights from all ranks.

Invariant: with ZeRO-3 a parameter is empty outside a pass. Whole tensors exist on rank 0 only, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from staleflow.training.deepspeed.process_group import Groups
from staleflow.training.deepspeed.settings import RankSettings


class ModelShard:
    """See the module."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.size = 1
        self.groups: Groups
        self.engine: Any = None
        self.settings: RankSettings
        self.updates = 0
        """Optimizer updates applied so far, as counted by Adam."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights, in the order of the state dict; tied weights have several."""
        return tuple(self.engine.module.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name; with ZeRO-3 parameters hold only this rank's part."""
        module = self.engine.module
        found = dict(module.named_parameters(remove_duplicate=False))
        found |= dict(module.named_buffers(remove_duplicate=False))
        return {name: found[name] for name in self.names}

    @torch.no_grad()
    def gather(self, names: Sequence[str], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
        """Yield weights one by one; with ZeRO-3 they are whole on rank 0 and empty on other ranks."""
        tensors = self.tensors()
        for name in names:
            tensor: Any = tensors[name]
            if not hasattr(tensor, "ds_tensor"):
                yield name, tensor
                continue
            whole = self.collect(tensor.ds_tensor, group)
            yield name, whole[: tensor.ds_numel].view(tensor.ds_shape) if self.rank == 0 else whole

    def collect(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Equal parts of all ranks, concatenated on rank 0 and on the CPU. Any number type."""
        flat = part.detach().contiguous().view(-1).cpu()
        raw = flat.view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(raw, parts, dst=0, group=group)
        return torch.cat(parts).view(flat.dtype) if parts is not None else flat[:0]
