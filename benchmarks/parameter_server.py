"""A push and pull pair against two plain copies of the same bytes, in the same run.

The pair is what a training step costs: copy the weights into a segment, lease it, copy it out into a rollout
instance's own memory. The yardstick is `np.copyto` twice between touched arrays, single-threaded. The two
alternate, so that a busy machine slows both; the figure is the median of the ratios. Goal: at most 1.25.

    python benchmarks/parameter_server.py [--mb 256] [--pairs 15] [--directory /dev/shm] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.servers.parameter_server import ParameterServer

TENSORS = 64


def copy(target: Mapping[str, NDArray[Any]], source: Mapping[str, NDArray[Any]]) -> None:
    for name, tensor in source.items():
        np.copyto(target[name], tensor)


def measure(megabytes: int, pairs: int, directory: str) -> dict[str, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="megabytes of weights")
    parser.add_argument("--pairs", type=int, default=15, help="pairs measured")
    parser.add_argument("--directory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.mb, options.pairs, options.directory)
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{options.mb} MB: two plain copies {result['plain_s']:.3f} s,"
            f" push and pull {result['push_pull_s']:.3f} s, ratio {result['ratio']:.3f} (goal: at most 1.25)"
        )


if __name__ == "__main__":
    main()
