"""Weights on every node of several on this machine, one of which stands still or loses its holder.

All tests share one cluster of three, each node with its own weights in shared memory. The machine's memory is
one, so what cannot be seen here is the speed of a network. Where NIXL is installed weights go by it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from test_ray_run import RUNTIME_TESTS

from staleflow.errors import TransportError
from staleflow.servers.directory import DIRECTORY_GROUPS, WeightDirectory
from staleflow.servers.shared_memory import SharedMemoryHandle
from staleflow.servers.transport import wait_for_weights

sys.path.insert(0, str(RUNTIME_TESTS))


from ray_cluster import LIMIT_S, Cluster, connected, wait_until

MEGABYTES = 48
PIECE_BYTES = 2**20

pytestmark = pytest.mark.timeout(600)


def weights(version: int) -> dict[str, NDArray[Any]]:
    return {
        "a": np.full(MEGABYTES * 2**18, version, np.float32),
        "b": np.full((3, 5), version, np.uint16),
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


# ---------------------------------------------------------------------- weights


class Pusher:
    """The trainer's side."""

    def __init__(self, handle: Any) -> None:
        self._publisher = handle.publisher()

    def push(self, version: int) -> float:
        tensors = weights(version)
        began = time.monotonic()
        self._publisher.push(version, tensors)
        return time.monotonic() - began

    def hold(self, version: int) -> None:
        self._held = self._publisher.hold(version)

    def release(self) -> None:
        self._held.release()


class Puller:
    """An instance's side."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._subscriber = handle.subscriber()

    def newest(self) -> int | None:
        try:
            newest: int | None = self._subscriber.newest()
        except TransportError:
            return None
        return newest

    def look(self, version: int | None = None) -> tuple[int, bool]:
        """The version leased, and whether every number is of it."""
        wait_for_weights(self._subscriber, LIMIT_S)
        with self._subscriber.lease(version) as lease:
            return lease.version, all(np.all(t == lease.version) for t in lease.tensors.values())

    def here(self) -> Any:
        return self._handle.here()

    def in_a_child(self) -> str:
        """What a process that knows nothing of Ray reads."""
        program = (
            "import pickle, sys; h = pickle.load(sys.stdin.buffer); lease = h.subscriber().lease();"
            "print(lease.version, lease.tensors['b'][0, 0], 'ray' in sys.modules)"
        )
        child = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(self.here()),
            stdout=subprocess.PIPE,
            check=True,
        )
        return child.stdout.decode().strip()


class Scene:
    """A directory, a trainer on the first node, and an instance on each."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        ids = {
            next(name for name in node["Resources"] if name.startswith("node_")): node["NodeID"]
            for node in ray.nodes()
            if node["Alive"]
        }
        self.nodes = [ids[f"node_{n}"] for n in range(3)]
        self.directory: Any = ray.remote(
            num_cpus=0, concurrency_groups=DIRECTORY_GROUPS, scheduling_strategy=self._at(0)
        )(WeightDirectory).remote()
        start = self.directory.start.remote("nodes", str(folder), transport="auto", piece_bytes=PIECE_BYTES)
        self.handle = ray.get(start, timeout=LIMIT_S)
        self.pusher = self._on(0, Pusher)
        self.pullers = [self._on(n, Puller) for n in range(3)]
        self.version = 0
        self.push()

    def _on(self, number: int, cls: type) -> Any:
        make: Any = ray.remote(num_cpus=0, scheduling_strategy=self._at(number))(cls)
        return make.remote(self.handle)

    def _at(self, number: int) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(node_id=self.nodes[number], soft=False)

    def get(self, reference: Any) -> Any:
        return ray.get(reference, timeout=LIMIT_S)

    def push(self) -> float:
        """Push the next version; returns seconds."""
        self.version += 1
        seconds: float = self.get(self.pusher.push.remote(self.version))
        return seconds

    def until_on(self, *numbers: int) -> None:
        for number in numbers:
            wait_until(
                lambda n=number: self.get(self.pullers[n].newest.remote()) == self.version,
                f"version {self.version} on node {number}",
            )

    def holder(self, number: int) -> psutil.Process:
        """The process that keeps the weights of a node."""
        _, actor = self.get(self.directory.store.remote(self.nodes[number]))
        return psutil.Process(self.get(actor.__ray_call__.remote(lambda _: os.getpid())))

    def looks(self, number: int, version: int | None = None) -> tuple[int, bool]:
        seen: tuple[int, bool] = self.get(self.pullers[number].look.remote(version))
        return seen


@pytest.fixture(scope="module")
def scene(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with connected(cluster):
        scene = Scene(cluster, tmp_path_factory.mktemp("shm"))
        yield scene
        ray.get(scene.directory.close.remote(), timeout=LIMIT_S)
        assert list(scene.folder.iterdir()) == []


def test_a_push_comes_to_every_node_once_and_not_through_the_command(scene: Scene) -> None:
    scene.until_on(0, 1, 2)
    driver = psutil.Process()
    before = driver.memory_info().rss
    for _ in range(3):
        scene.push()
        scene.until_on(0, 1, 2)
    assert driver.memory_info().rss - before < MEGABYTES * 2**20 / 2
    assert [scene.looks(n) for n in range(3)] == [(scene.version, True)] * 3
    folders = [Path(scene.get(puller.here.remote()).folder) for puller in scene.pullers]
    assert sorted(folders) == sorted(scene.folder.glob("staleflow-ps-*")), "one store a node"
    assert len(set(folders)) == 3


def test_a_child_process_reads_the_store_of_its_node_without_ray(scene: Scene) -> None:
    scene.until_on(2)
    assert isinstance(scene.get(scene.pullers[2].here.remote()), SharedMemoryHandle)
    assert scene.get(scene.pullers[2].in_a_child.remote()) == f"{scene.version} {scene.version} False"


def test_what_evaluation_holds_is_found_on_every_node(scene: Scene) -> None:
    scene.get(scene.pusher.hold.remote(scene.version))
    held = scene.version
    for _ in range(3):
        scene.push()
    scene.until_on(1, 2)
    assert [scene.looks(n, held) for n in range(3)] == [(held, True)] * 3
    assert scene.looks(1) == (scene.version, True)
    scene.get(scene.pusher.release.remote())


def test_a_node_that_stands_still_holds_up_nobody_and_catches_up(scene: Scene) -> None:
    scene.until_on(0, 1, 2)
    before, holder = scene.version, scene.holder(2)
    holder.suspend()
    try:
        assert max(scene.push() for _ in range(3)) < 20
        scene.until_on(0, 1)
        assert scene.looks(2) == (before, True)
    finally:
        holder.resume()
    scene.until_on(2)
    assert scene.looks(2) == (scene.version, True)


def test_a_node_whose_holder_dies_in_the_middle_of_a_transfer_gets_another(scene: Scene) -> None:
    """F36: the others are unaffected, nothing torn is ever seen, and the transfer is made again."""
    scene.until_on(0, 1, 2)
    source, dying = scene.holder(0), scene.holder(2)
    before = len(list(scene.folder.iterdir()))
    scene.push()
    time.sleep(0.05)
    source.suspend()
    try:
        dying.kill()
        wait_until(lambda: len(list(scene.folder.iterdir())) == before - 1, "removal of its store")
    finally:
        source.resume()
    scene.until_on(0, 1)
    scene.until_on(2)
    assert [scene.looks(n) for n in range(3)] == [(scene.version, True)] * 3
