"""The parameter server with real processes that race, stall and are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.parameter_server import ParameterServer
from staleflow.servers.shared_memory import SharedMemoryHandle

SPAWN = multiprocessing.get_context("spawn")
ANSWER_WITHIN_S = 30.0


def weights(version: int, size: int = 200_000) -> dict[str, NDArray[Any]]:
    return {f"layer.{i}": np.full(size, version, dtype=np.float32) for i in range(4)}


def whole(tensors: Any, version: int) -> bool:
    return all(bool(np.all(tensor == version)) for tensor in tensors.values())


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[SharedMemoryHandle]:
    with ParameterServer(directory=str(tmp_path)) as server:
        assert isinstance(server.handle, SharedMemoryHandle)
        yield server.handle


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[BaseProcess, Connection]]]:
    """Starts a process with a pipe; kills what is left of it at the end."""
    started: list[tuple[BaseProcess, Connection]] = []

    def begin(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(*arguments, there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
        return process, here

    yield begin
    for process, here in started:
        process.kill()
        process.join(ANSWER_WITHIN_S)
        process.close()
        here.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(ANSWER_WITHIN_S), "the child process did not answer"
    return pipe.recv()


def pull_until_told(handle: SharedMemoryHandle, pipe: Connection) -> None:
    """Pull as fast as possible; every payload must be all of one version, and versions must not fall."""
    subscriber = handle.subscriber()
    pulls, torn, last = 0, 0, -1
    pipe.send("ready")
    while not pipe.poll():
        with subscriber.lease() as lease:
            torn += not whole(lease.tensors, lease.version) or lease.version < last
            last = lease.version
            pulls += 1
    pipe.send((pulls, torn))


def pull_and_wait(handle: SharedMemoryHandle, pipe: Connection) -> None:
    """Lease, wait to be told, then read."""
    with handle.subscriber().lease() as lease:
        pipe.send(lease.version)
        pipe.recv()
        pipe.send(whole(lease.tensors, lease.version))


def push_for_ever(handle: SharedMemoryHandle, first: int, pipe: Connection) -> None:
    publisher = handle.publisher()
    pipe.send("ready")
    version = first
    while True:
        publisher.push(version, weights(version))
        version += 1


def own_a_server(directory: str, pipe: Connection, guarded: bool = False) -> None:
    server = ParameterServer(directory=directory, guarded=guarded)
    server.handle.publisher().push(0, weights(0))
    pipe.send(server.handle)
    time.sleep(ANSWER_WITHIN_S)


def test_no_pull_is_ever_torn_while_pushes_go_on(handle: SharedMemoryHandle, start: Any) -> None:
    publisher = handle.publisher()
    publisher.push(0, weights(0))
    pullers = [start(pull_until_told, handle) for _ in range(3)]
    for _, pipe in pullers:
        assert answer(pipe) == "ready"
    version, deadline = 0, time.monotonic() + 3
    while time.monotonic() < deadline:
        version += 1
        publisher.push(version, weights(version))
    for _, pipe in pullers:
        pipe.send("stop")
        pulls, torn = answer(pipe)
        assert pulls > 10
        assert torn == 0
    assert version > 20
    assert len(list(Path(handle.folder).glob("segment-*"))) <= len(pullers) + 2


def test_a_puller_stalled_over_three_pushes_reads_its_whole_version(
    handle: SharedMemoryHandle, start: Any
) -> None:
    publisher = handle.publisher()
    publisher.push(0, weights(0))
    process, pipe = start(pull_and_wait, handle)
    assert answer(pipe) == 0
    os.kill(process.pid, signal.SIGSTOP)
    for version in (1, 2, 3):
        publisher.push(version, weights(version))
    assert handle.subscriber().newest() == 3
    os.kill(process.pid, signal.SIGCONT)
    pipe.send("read now")
    assert answer(pipe) is True


def test_a_puller_killed_in_the_middle_frees_its_segment(handle: SharedMemoryHandle, start: Any) -> None:
    publisher = handle.publisher()
    publisher.push(0, weights(0))
    process, pipe = start(pull_and_wait, handle)
    assert answer(pipe) == 0
    for version in range(1, 5):
        publisher.push(version, weights(version))
    assert len(list(Path(handle.folder).glob("segment-*"))) == 3
    process.kill()
    process.join()
    leases = []
    publisher.push(5, weights(5))
    leases.append(handle.subscriber().lease())
    publisher.push(6, weights(6))
    publisher.push(7, weights(7))
    assert len(list(Path(handle.folder).glob("segment-*"))) == 3, "the dead puller's segment was not reused"
    assert whole(leases[0].tensors, 5)


@pytest.mark.parametrize("attempt", range(4))
def test_a_publisher_killed_in_the_middle_leaves_the_newest_version_whole(
    handle: SharedMemoryHandle, start: Any, attempt: int
) -> None:
    process, pipe = start(push_for_ever, handle, 0)
    assert answer(pipe) == "ready"
    subscriber = handle.subscriber()
    while subscriber.newest() is None:
        time.sleep(0.001)
    time.sleep(0.05 + 0.0137 * attempt)
    process.kill()
    process.join()
    newest = subscriber.newest()
    assert newest is not None
    with subscriber.lease() as lease:
        assert lease.version == newest
        assert whole(lease.tensors, newest)
    following = handle.publisher()
    following.push(newest + 1, weights(newest + 1))
    with subscriber.lease() as lease:
        assert whole(lease.tensors, newest + 1)


def test_a_copy_that_dies_half_way_is_never_read_under_either_version(handle: SharedMemoryHandle) -> None:
    publisher, subscriber = handle.publisher(), handle.subscriber()
    for version in (0, 1):
        publisher.push(version, weights(version))

    class Dies(dict[str, NDArray[Any]]):
        def items(self) -> Any:
            for name, tensor in super().items():
                if name == "layer.2":
                    raise KeyboardInterrupt
                yield name, tensor

    with pytest.raises(KeyboardInterrupt):
        publisher.push(2, Dies(weights(2)))
    assert subscriber.newest() == 1
    for gone in (0, 2):
        with pytest.raises(TransportError, match=r"gone|not pushed"):
            subscriber.lease(gone)
    publisher.push(2, weights(2))
    with subscriber.lease() as lease:
        assert whole(lease.tensors, 2)


def test_the_folder_of_a_killed_owner_is_swept_by_the_next_run(tmp_path: Path, start: Any) -> None:
    process, pipe = start(own_a_server, str(tmp_path))
    left_over = Path(answer(pipe).folder)
    with ParameterServer(directory=str(tmp_path)):
        assert left_over.is_dir(), "a live run's folder was swept"
    process.kill()
    process.join()
    assert left_over.is_dir()
    with ParameterServer(directory=str(tmp_path)) as server:
        assert not left_over.exists()
        assert isinstance(server.handle, SharedMemoryHandle)
        assert list(tmp_path.iterdir()) == [Path(server.handle.folder)]


def own_a_guarded_server(directory: str, pipe: Connection) -> None:
    own_a_server(directory, pipe, guarded=True)


def test_a_guarded_folder_goes_when_its_owner_is_killed(tmp_path: Path, start: Any) -> None:
    """F37: on a node of a cluster nobody else would remove it before the next run that starts there."""
    process, pipe = start(own_a_guarded_server, str(tmp_path))
    left_over = Path(answer(pipe).folder)
    assert left_over.is_dir()
    process.kill()
    process.join()
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while left_over.exists():
        assert time.monotonic() < deadline, "the folder of a killed owner is still there"
        time.sleep(0.05)


def test_a_forked_child_that_lives_on_does_not_keep_its_parents_lease(handle: SharedMemoryHandle) -> None:
    publisher, subscriber = handle.publisher(), handle.subscriber()
    publisher.push(0, weights(0))
    lease = subscriber.lease()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read_end, 1)
        os._exit(0)
    try:
        lease.release()
        for version in (1, 2, 3):
            publisher.push(version, weights(version))
        assert len(list(Path(handle.folder).glob("segment-*"))) == 2
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)
