"""A push and pull pair against two plain copies of the same bytes, in the same run.

The pair is what a training step costs: copy the weights into a segment, lease it, copy it out into a rollout
instance's own memory. The yardstick is `np.copyto` twice between touched arrays, single-threaded. The two
alternate, so that a busy machine slows both; the figure is the median of the ratios. Goal: at most 1.25.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.experiments.study import Finding, Options, Result, Study
from staleflow.servers.parameter_server import ParameterServer

TENSORS = 64
WEIGHTS_MB = 256
GOAL = 1.25
"""Ratio of a push and a pull to two plain copies."""


def copy(target: Mapping[str, NDArray[Any]], source: Mapping[str, NDArray[Any]]) -> None:
    """Copy every tensor."""
    for name, tensor in source.items():
        np.copyto(target[name], tensor)


def measure(megabytes: int, pairs: int, directory: str) -> dict[str, float]:
    """Median seconds of either, and the median ratio."""
    size = megabytes * 2**20 // 4 // TENSORS
    source = {f"layer.{i}": np.full(size, i, dtype=np.float32) for i in range(TENSORS)}
    between = {name: np.ones_like(tensor) for name, tensor in source.items()}
    target = {name: np.ones_like(tensor) for name, tensor in source.items()}
    plain, served = [], []
    with ParameterServer(directory=directory) as server:
        publisher, subscriber = server.handle.publisher(), server.handle.subscriber()
        for version in range(pairs + 2):
            start = time.perf_counter()
            copy(between, source)
            copy(target, between)
            middle = time.perf_counter()
            publisher.push(version, source)
            with subscriber.lease() as lease:
                copy(target, lease.tensors)
            end = time.perf_counter()
            if version >= 2:  # the first two allocate the two segments
                plain.append(middle - start)
                served.append(end - middle)
        publisher.close()
        subscriber.close()
    return {
        "megabytes": megabytes,
        "plain_s": statistics.median(plain),
        "push_pull_s": statistics.median(served),
        "ratio": statistics.median(mine / other for mine, other in zip(served, plain, strict=True)),
    }


def findings(options: Options) -> tuple[Finding, ...]:
    """A push and a pull beside two plain copies, in memory."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        room = shutil.disk_usage(folder).free // 2**20
        megabytes = min(16 if options.quick else WEIGHTS_MB, room // 4)
        result = measure(megabytes, 5 if options.quick else 15, folder)
    return (
        Finding(
            name="push and pull, of two plain copies",
            value=result["ratio"],
            unit="x",
            goal=GOAL,
            note=f"{megabytes} MB in {TENSORS} tensors; two plain copies: {result['plain_s'] * 1e3:.3g} ms",
        ),
        Finding(name="push and pull", value=result["push_pull_s"] * 1e3, unit="ms"),
    )


WEIGHTS = Study(
    name="weights",
    question="What do a push and a pull of weights take beside two plain copies of the same bytes?",
    script=lambda options: Result(findings=findings(options)),
)
