"""Checkpoints that any number of ranks and any ZeRO stage can load, whichever wrote them.

Invariants:

- a checkpoint holds whole tensors by parameter name, independent of how they were sharded;
- only rank 0 reads and writes files, so no shared disk is needed; it holds one tensor of each kind at a time,
  and one file of tensors while it writes;
- the folder is a Hugging Face model folder.

::

    config.json, model-00001.safetensors ..        the model, in its number type
    model.safetensors.index.json                   which file has which weight
    optimizer-00001.safetensors ..                 `exp_avg/<name>`, `exp_avg_sq/<name>`, `master/<name>`
    deepspeed.json                                 version, updates made, files

`master` exists only if the model is not float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from staleflow.errors import RunFailed
from staleflow.training.deepspeed.model_shard import ModelShard
from staleflow.training.deepspeed.state import MOMENTS, broadcast, state_of

STATE_FILE = "deepspeed.json"
INDEX_FILE = "model.safetensors.index.json"
MASTER = "master"
FILE_BYTES = 2 << 30
"""Size at which a file is closed and the next one started."""


class _Files:
    """Collects tensors and writes them to numbered files. `folder` None: a rank that writes nothing."""

    def __init__(self, folder: Path | None, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        self.index: dict[str, str] = {}
        """Tensor name -> file name."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor."""
        if self._folder is None:
            return
        # Cloned, because a view of weights may change before it is written.
        self._waiting[name] = tensor.detach().cpu().clone()
        self._bytes += tensor.nbytes
        if self._bytes >= FILE_BYTES:
            self.close()

    def close(self) -> None:
        """Write the collected tensors."""
        if self._folder is None or not self._waiting:
            return
        name = f"{self._prefix}-{len(set(self.index.values())) + 1:05d}.safetensors"
        save_file(self._waiting, self._folder / name, metadata={"format": "pt"})
        self.index |= dict.fromkeys(self._waiting, name)
        self._waiting, self._bytes = {}, 0


def save(rank: ModelShard, folder: Path, version: int) -> None:
    """Write a checkpoint. Called by all ranks; `folder` is rank 0's."""
    target = folder if rank.rank == 0 else None
    weights, optimizer = _Files(target, "model"), _Files(target, "optimizer")
    names = list(untied(rank))
    for name, tensor in rank.gather(names, rank.groups.talk):
        weights.add(name, tensor)
    weights.close()
    state, keys = state_of(rank), _keys(rank)
    for name, parameter in untied(rank).items():
        for key in keys if isinstance(parameter, torch.nn.Parameter) else ():
            whole = state.read(parameter, None if key == MASTER else key)
            optimizer.add(f"{key}/{name}", whole)
    optimizer.close()
    if target is not None:
        rank.engine.module.config.save_pretrained(target)
        (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weights.index}, indent=1))
        about = {"version": version, "updates": rank.updates, "optimizer": optimizer.index}
        (target / STATE_FILE).write_text(json.dumps(about, indent=1))


def load(rank: ModelShard, folder: Path) -> int:
    """Restore what `save` wrote; returns the version. Called by all ranks; `folder` is rank 0's.

    Raises RunFailed, on every rank, if the folder is of another model.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in untied(rank).items()}
    about: list[Any] = [_read_about(folder, shapes) if rank.rank == 0 else None]
    dist.broadcast_object_list(about, src=0, group=rank.groups.talk)
    found = about[0]
    if isinstance(found, str):
        raise RunFailed(f"the checkpoint {folder} {found}")
    rank.updates = int(found["updates"])
    state = state_of(rank)
    if rank.updates:
        state.prepare(rank.updates)
    with ExitStack() as open_files:
        reader = _Reader(folder, found["index"], open_files) if rank.rank == 0 else None
        for name, parameter in untied(rank).items():
            size = getattr(parameter, "ds_numel", parameter.numel())

            def whole(key: str, size: int = size) -> Tensor:
                return broadcast(reader.tensor(key) if reader else None, size, rank.groups.talk)

            if not isinstance(parameter, torch.nn.Parameter):
                parameter.data.copy_(whole(name).view(parameter.shape))
                continue
            master = f"{MASTER}/{name}"
            state.write(parameter, None, whole(master if master in found["index"] else name))
            for key in MOMENTS if rank.updates else ():
                state.write(parameter, key, whole(f"{key}/{name}"))
    state.finish()
    return int(found["version"])


def untied(rank: ModelShard) -> dict[str, Tensor]:
    """Parameters and buffers, each under its first name only."""
    seen: set[int] = set()
    found = {}
    for name, tensor in rank.tensors().items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _keys(rank: ModelShard) -> Iterator[str] | tuple[str, ...]:
    masters = () if rank.settings.dtype == "float32" else (MASTER,)
    return (*masters, *(MOMENTS if rank.updates else ()))


def _read_about(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | str:
    """Rank 0's description of the checkpoint for all ranks, or an error."""
    try:
        about = json.loads((folder / STATE_FILE).read_text())
        weights = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        return "was not written by the deepspeed trainer, or is damaged"
    if weights.keys() != shapes.keys():
        return "is of another model than this run's"
    with ExitStack() as open_files:
        reader = _Reader(folder, weights, open_files)
        if any(reader.shape(name) != shape for name, shape in shapes.items()):
            return "is of another model than this run's"
    return {**about, "index": weights | about["optimizer"]}


class _Reader:
    """Reads single tensors from a checkpoint's files."""

    def __init__(self, folder: Path, index: Mapping[str, str], open_files: ExitStack) -> None:
        self._index = index
        self._files = {
            name: open_files.enter_context(safe_open(folder / name, framework="pt"))
            for name in sorted(set(index.values()))
        }

    def tensor(self, key: str) -> Tensor:
        found: Tensor = self._files[self._index[key]].get_tensor(key)
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._files[self._index[key]].get_slice(key).get_shape())
