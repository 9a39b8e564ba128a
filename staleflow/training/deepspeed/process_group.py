"""The process group of one world of ranks: joining it, and leaving it.

Invariants:

- environment variables that DeepSpeed reads are set in the rank's own process, before it is imported there;
- nothing is compiled at start-up: DeepSpeed would build an operator for collectives in shared memory, which
  takes minutes, and waits for ever on the lock that a killed build left behind;
- besides the group that DeepSpeed works in there are two of CPU tensors: one for what the ranks tell each
  other, one for weights on their way out, which is used while the others are in use too.
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
    """`auto` is nccl where there is a GPU."""
    if name != "auto":
        return name
    return "nccl" if torch.cuda.is_available() else "gloo"


def open_meeting(host: str, ranks: int, timeout_s: float) -> TCPStore:
    """Rank 0's side: a port is chosen and kept open, so that nobody else can take it."""
    return TCPStore(
        host, 0, ranks, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(rank: int, meeting: Meeting, store: TCPStore | None = None) -> Groups:
    """Meet the other ranks. `store` is what `open_meeting` gave rank 0; None for the others."""
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
    # All are here before a collective's own time limit counts: starting may take longer than that.
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
    """Give every group its time limit: those that DeepSpeed makes have torch's own, half an hour."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def load_deepspeed() -> Any:
    """Import DeepSpeed, quietly. The environment must be set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def leave() -> None:
    """Take this process out of its world. May be called twice."""
    if dist.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
