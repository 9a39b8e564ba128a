"""What every transport of the parameter server promises, seen from one process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staleflow.errors import TransportError, UserError
from staleflow.servers.parameter_server import ParameterServer
from staleflow.servers.shared_memory import SharedMemoryHandle
from staleflow.servers.transport import Handle


def weights(version: int) -> dict[str, NDArray[Any]]:
    """A model whose every number is its version."""
    return {
        "embed.weight": np.full((5, 3), version, dtype=np.float32),
        "head.bias": np.full(7, version, dtype=np.uint16),
        "scale": np.full((), version, dtype=np.float64),
    }


@pytest.fixture(params=["shared_memory", "memory"])
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Handle]:
    options: dict[str, Any] = {"directory": str(tmp_path)} if request.param == "shared_memory" else {}
    with ParameterServer(request.param, **options) as server:
        yield server.handle


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of one run of the shared_memory transport."""
    with ParameterServer(directory=str(tmp_path)) as server:
        assert isinstance(server.handle, SharedMemoryHandle)
        yield Path(server.handle.folder)


def test_a_pull_returns_names_types_shapes_and_values_of_the_push(handle: Handle) -> None:
    handle.publisher().push(3, weights(3))
    subscriber = handle.subscriber()
    assert subscriber.newest() == 3
    with subscriber.lease() as lease:
        assert lease.version == 3
        assert list(lease.tensors) == ["embed.weight", "head.bias", "scale"]
        for name, expected in weights(3).items():
            assert lease.tensors[name].dtype == expected.dtype
            assert lease.tensors[name].shape == expected.shape
            np.testing.assert_array_equal(lease.tensors[name], expected)


def test_before_the_first_push_there_is_nothing_to_lease(handle: Handle) -> None:
    subscriber = handle.subscriber()
    assert subscriber.newest() is None
    with pytest.raises(TransportError, match="no weights were pushed yet"):
        subscriber.lease()


def test_what_is_pushed_is_a_copy(handle: Handle) -> None:
    tensors = weights(0)
    handle.publisher().push(0, tensors)
    tensors["embed.weight"][:] = 99
    with handle.subscriber().lease() as lease:
        assert np.all(lease.tensors["embed.weight"] == 0)


def test_tensors_that_are_not_contiguous_are_pushed_by_value(handle: Handle) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    handle.publisher().push(0, {"transposed": matrix.T})
    with handle.subscriber().lease() as lease:
        np.testing.assert_array_equal(lease.tensors["transposed"], matrix.T)


class Gathered(dict[str, NDArray[Any]]):
    """Weights that are made one by one and are gone when the next is asked for, as from a sharded model."""

    def items(self) -> Any:
        room = np.empty(0, np.uint8)
        for name, tensor in super().items():
            room[:] = 0xFF
            room = tensor.copy().reshape(-1).view(np.uint8)
            yield name, room.view(tensor.dtype).reshape(tensor.shape)

    def __getitem__(self, name: str) -> NDArray[Any]:
        raise AssertionError(f"{name} would be gathered again")


def test_weights_may_be_made_one_by_one_while_they_are_pushed(handle: Handle) -> None:
    publisher, subscriber = handle.publisher(), handle.subscriber()
    for version in range(3):
        publisher.push(version, Gathered(weights(version)))
        with subscriber.lease() as lease:
            assert lease.version == version
            assert list(lease.tensors) == ["embed.weight", "head.bias", "scale"]
            for name, expected in weights(version).items():
                np.testing.assert_array_equal(lease.tensors[name], expected)


def test_leased_tensors_cannot_be_written(handle: Handle) -> None:
    handle.publisher().push(0, weights(0))
    with handle.subscriber().lease() as lease, pytest.raises(ValueError, match="read-only"):
        lease.tensors["head.bias"][0] = 1


def test_a_lease_keeps_its_version_over_later_pushes_and_the_newest_goes_on(handle: Handle) -> None:
    publisher, subscriber = handle.publisher(), handle.subscriber()
    publisher.push(0, weights(0))
    with subscriber.lease() as old:
        for version in range(1, 6):
            publisher.push(version, weights(version))
        assert all(np.all(tensor == 0) for tensor in old.tensors.values())
        with subscriber.lease() as new:
            assert new.version == 5
            assert all(np.all(tensor == 5) for tensor in new.tensors.values())


def test_a_held_version_can_be_leased_by_number_until_it_is_released(handle: Handle) -> None:
    publisher, subscriber = handle.publisher(), handle.subscriber()
    publisher.push(0, weights(0))
    held = publisher.hold(0)
    for version in (1, 2, 3):
        publisher.push(version, weights(version))
    with subscriber.lease(0) as lease:
        assert np.all(lease.tensors["scale"] == 0)
    held.release()
    for version in (4, 5, 6):
        publisher.push(version, weights(version))
    with pytest.raises(TransportError, match="weight version 0 is gone; newest is 6"):
        subscriber.lease(0)


def test_a_version_that_was_never_pushed_is_refused(handle: Handle) -> None:
    handle.publisher().push(4, weights(4))
    with pytest.raises(TransportError, match="weight version 5 was not pushed; newest is 4"):
        handle.subscriber().lease(5)


@pytest.mark.parametrize("version", [1, 2])
def test_versions_only_grow(handle: Handle, version: int) -> None:
    publisher = handle.publisher()
    publisher.push(2, weights(2))
    with pytest.raises(TransportError, match=f"version {version} is not above the newest, 2"):
        publisher.push(version, weights(version))
    assert handle.subscriber().newest() == 2


def test_a_push_of_other_shapes_names_the_tensor_and_changes_nothing(handle: Handle) -> None:
    publisher = handle.publisher()
    publisher.push(0, weights(0))
    with pytest.raises(TransportError, match=r"'head\.bias' was .*\(7,\).* and is .*\(8,\)"):
        publisher.push(1, {**weights(1), "head.bias": np.zeros(8, dtype=np.uint16)})
    with handle.subscriber().lease() as lease:
        assert lease.version == 0


def test_a_type_without_plain_bytes_is_refused(handle: Handle) -> None:
    with pytest.raises(TransportError, match="'x' has type object"):
        handle.publisher().push(0, {"x": np.array([object()])})


def test_a_released_lease_shows_nothing(handle: Handle) -> None:
    handle.publisher().push(0, weights(0))
    lease = handle.subscriber().lease()
    lease.release()
    lease.release()
    with pytest.raises(TransportError, match="was released"):
        _ = lease.tensors


def test_segments_are_reused_and_at_most_the_leases_plus_two(folder: Path) -> None:
    handle = SharedMemoryHandle(str(folder))
    publisher, subscriber = handle.publisher(), handle.subscriber()
    for version in range(10):
        publisher.push(version, weights(version))
    assert len(list(folder.glob("segment-*"))) == 2
    leases = []
    for version in range(10, 16):
        publisher.push(version, weights(version))
        leases.append(subscriber.lease())
        assert len(list(folder.glob("segment-*"))) <= len(leases) + 2
    for lease in leases:
        assert all(np.all(tensor == lease.version) for tensor in lease.tensors.values())
        lease.release()
    before = len(list(folder.glob("segment-*")))
    for version in range(16, 30):
        publisher.push(version, weights(version))
    assert len(list(folder.glob("segment-*"))) == before


def test_a_lease_that_is_dropped_without_release_frees_its_segment(folder: Path) -> None:
    handle = SharedMemoryHandle(str(folder))
    publisher, subscriber = handle.publisher(), handle.subscriber()
    for version in range(20):
        publisher.push(version, weights(version))
        subscriber.lease()
    assert len(list(folder.glob("segment-*"))) <= 3


def test_there_is_one_publisher_at_a_time_and_the_next_goes_on(folder: Path) -> None:
    handle = SharedMemoryHandle(str(folder))
    first = handle.publisher()
    first.push(0, weights(0))
    with pytest.raises(TransportError, match="another publisher already pushes to"):
        handle.publisher()
    first.close()
    second = handle.publisher()
    with pytest.raises(TransportError, match="not above the newest"):
        second.push(0, weights(0))
    second.push(1, weights(1))
    assert len(list(folder.glob("segment-*"))) == 2


def test_handles_of_shared_memory_are_pickled_and_those_of_memory_refused(tmp_path: Path) -> None:
    with ParameterServer(directory=str(tmp_path)) as server:
        assert pickle.loads(pickle.dumps(server.handle)) == server.handle
    with ParameterServer("memory") as server, pytest.raises(TransportError, match="one process only"):
        pickle.dumps(server.handle)


def test_closing_removes_the_folder_and_later_calls_say_that_it_is_gone(tmp_path: Path) -> None:
    server = ParameterServer(directory=str(tmp_path), run_name="a/b c")
    publisher, subscriber = server.handle.publisher(), server.handle.subscriber()
    publisher.push(0, weights(0))
    server.close()
    server.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransportError, match="gone"):
        subscriber.newest()
    with pytest.raises(TransportError, match="gone"):
        publisher.push(1, weights(1))
    with pytest.raises(TransportError, match="gone"):
        server.handle.publisher()


def test_a_live_run_in_the_same_directory_is_left_alone(tmp_path: Path) -> None:
    with ParameterServer(directory=str(tmp_path)) as first:
        first.handle.publisher().push(0, weights(0))
        with ParameterServer(directory=str(tmp_path)):
            assert first.handle.subscriber().newest() == 0


def test_too_little_room_at_a_push_leaves_the_newest_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = SharedMemoryHandle(str(folder))
    publisher = handle.publisher()
    publisher.push(0, weights(0))
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(TransportError, match=r"which has 0 bytes free.*--shm-size"):
        publisher.push(1, weights(1))
    assert handle.subscriber().newest() == 0


@pytest.mark.parametrize(
    ("transport", "options", "message"),
    [
        ("shared_memroy", {}, "did you mean shared_memory"),
        ("no_such_package.Thing", {}, "no_such_package failed with ModuleNotFoundError"),
        ("shared_memory", {"directory": "/no/such/folder"}, "/no/such/folder: No such file"),
        ("shared_memory", {"folder": "/tmp"}, "cannot be made with options"),
    ],
)
def test_bad_options_are_the_users_error(transport: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParameterServer(transport, **options)


def test_a_transport_of_the_users_own_is_found_by_its_dotted_path() -> None:
    with ParameterServer("staleflow.servers.memory.MemoryTransport") as server:
        server.handle.publisher().push(0, weights(0))
        assert server.handle.subscriber().newest() == 0
