"""The process groups of one world of ranks: joining and leaving.

Invariants:

- environment variables that DeepSpeed reads are set in the rank's own process, before it is imported there;
- nothing is compiled at startup: DeepSpeed would build an operator for collectives in shared memory, which
  takes minutes and blocks for ever on the lock of a killed build;
- besides DeepSpeed's group there are two groups for CPU tensors: one for messages between ranks, one for
  sending weights, which runs concurrently with the others.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how the ranks of a world meet. Picklable."""

    host: str
    port: int
    ranks: int
    backend: str
    """gloo or nccl."""
    start_timeout_s: float
    timeout_s: float
    """A collective that takes longer fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of CPU tensors."""

    talk: dist.ProcessGroup
    push: dist.ProcessGroup


def choose_backend(name: str) -> str:
    """`auto` is nccl with a GPU, else gloo."""
    if name != "auto":
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def open_meeting(host: str, ranks: int, timeout_s: float) -> TCPStore:
    """Rank 0's side: choose a port and keep it open, so that no other process can take it."""
    return TCPStore(
        host, 0, ranks, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(rank: int, meeting: Meeting, store: TCPStore | None = None) -> Groups:
    """Meet the other ranks. `store`: for rank 0 the result of `open_meeting`; for the others None."""
    local = rank % max(1, torch.cuda.device_count())
    os.environ["LOCAL_RANK"] = str(local)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(meeting.ranks)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    if store is None:
        store = TCPStore(
            meeting.host,
            meeting.port,
            meeting.ranks,
            is_master=False,
            timeout=timedelta(seconds=meeting.start_timeout_s),
            wait_for_workers=False,
        )
    load_deepspeed()
    # Wait for all ranks before the time limit of collectives applies: starting may take longer.
    store.set(f"rank-{rank}", "here")
    store.wait([f"rank-{n}" for n in range(meeting.ranks)], timedelta(seconds=meeting.start_timeout_s))
    limit = timedelta(seconds=meeting.timeout_s)
    if meeting.backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(meeting.backend, store=store, rank=rank, world_size=meeting.ranks, timeout=limit)
    return Groups(
        talk=dist.new_group(backend="gloo", timeout=limit), push=dist.new_group(backend="gloo", timeout=limit)
    )


def limit_groups(timeout_s: float) -> None:
    """Set the time limit of every group: DeepSpeed's own groups have torch's default, half an hour."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def load_deepspeed() -> Any:
    """Import DeepSpeed without its warnings. The environment must be set before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def leave() -> None:
    """Leave the world. May be called twice."""
    if dist.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
