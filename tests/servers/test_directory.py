"""How pieces travel is chosen by what both ends can do. No NIXL is needed: the ends say what they can."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.errors import ConfigError
from staleflow.servers import direct
from staleflow.servers.direct import DIRECT, as_array, put_piece
from staleflow.servers.directory import WeightDirectory, _Holder
from staleflow.servers.holder import HolderUp
from staleflow.servers.shared_memory import SharedMemoryHandle


class Method:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Actor:
    def __init__(self) -> None:
        self.follow = Method()
        self.tell = Method()


def holder(*, can_direct: bool) -> _Holder:
    return _Holder(Actor(), HolderUp(handle=SharedMemoryHandle("/none"), direct=can_direct))


@pytest.mark.parametrize(
    ("source", "other", "chosen", "said"),
    [
        (True, True, True, "direct transport (nixl)"),
        (True, False, False, "Ray's object store"),
        (False, True, False, "Ray's object store"),
    ],
)
def test_the_direct_transport_is_taken_where_both_ends_have_it_and_the_log_says_so(
    source: bool, other: bool, chosen: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = WeightDirectory()
    holders = {"s": holder(can_direct=source), "o": holder(can_direct=other)}
    directory._holders, directory._source = holders, "s"
    with caplog.at_level(logging.INFO):
        for node, there in holders.items():
            directory._have_follow(node, there)
            directory._have_follow(node, there)
    assert holders["o"].actor.follow.calls == [(holders["s"].actor, chosen)]
    assert holders["s"].actor.follow.calls == [], "the source has nobody to follow"
    assert caplog.messages == [f"weights to node o go by {said}"]


def test_device_is_refused_where_its_library_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DIRECT), "installed", lambda _: False)
    with pytest.raises(ConfigError, match="needs the package nixl on every node"):
        WeightDirectory().start("run", None, transport="device", piece_bytes=1)


def test_a_piece_for_the_direct_transport_is_a_tensor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NIXL registers must not be the segment, which goes on to other versions."""
    put: list[tuple[Any, str | None]] = []

    class Ray:
        def put(self, value: Any, _tensor_transport: str | None = None) -> None:
            put.append((value, _tensor_transport))

    monkeypatch.setattr(direct, "ray", Ray())
    piece = np.arange(5, dtype=np.uint8)
    piece.flags.writeable = False
    put_piece(piece, direct=True)
    put_piece(piece, direct=False)
    (tensor, by), (array, plainly) = put
    assert (by, plainly) == ("nixl", None)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.data_ptr() != piece.ctypes.data
    assert array is piece
    for got in (tensor, array):
        np.testing.assert_array_equal(as_array(got), piece)
