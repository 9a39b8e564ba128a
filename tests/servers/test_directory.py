"""How pieces travel is chosen by what both ends can do. No NIXL is needed: the ends say what they can."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import GetTimeoutError

from staleflow.errors import ConfigError, TransportError
from staleflow.servers import direct, directory, nodes
from staleflow.servers.direct import DIRECT, as_array, put_piece
from staleflow.servers.directory import WeightDirectory, _Holder
from staleflow.servers.holder import HolderUp, WeightHolder
from staleflow.servers.nodes import NodeSubscriber
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
        self.live = Method()
        self.bring = Method()
        self.let_go = Method()


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
    assert caplog.messages == [f"weights reach node o by {said}"]


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


class Late:
    """Ray, where no answer comes in time."""

    def get(self, _: Any, timeout: float) -> None:
        raise GetTimeoutError


def test_a_source_that_is_only_slow_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes on pushing to its store; a new one would stay empty, and take that one's place."""
    monkeypatch.setattr(directory, "ray", Late())
    there: Any = WeightDirectory()
    there._holders = {"s": holder(can_direct=False), "o": holder(can_direct=False)}
    there._source, there._all = "s", threading.Lock()
    there._locks = defaultdict(threading.Lock)
    source, new = there._holders["s"], holder(can_direct=False)
    monkeypatch.setattr(there, "_start_holder", lambda _: new)
    assert there.store("s")[1] is source.actor
    assert there.store("o")[1] is new.actor
    assert new.actor.follow.calls == [(source.actor, False)]


def test_a_version_that_was_waited_for_in_vain_is_let_go_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "ray", Late())
    subscriber = NodeSubscriber(None)
    subscriber._holder = actor = Actor()
    with pytest.raises(TransportError, match="does not answer"):
        subscriber._fetched(3, None)  # type: ignore[arg-type]
    assert (actor.bring.calls, actor.let_go.calls) == ([(3,)], [(3,)])


def test_whatever_breaks_a_transfer_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NIXL raises is no error of Ray's."""
    there = WeightHolder()
    there._node, there._closed, there._announced = "n", False, 1
    there._news, there._storing = threading.Condition(), threading.Lock()
    monkeypatch.setattr("staleflow.servers.holder.LEAST_REST_S", 0.01)

    class Scripted:
        tries = 0

        def newest(self) -> None:
            return None

        def bring_newest(self, _: None) -> int:
            self.tries += 1
            if self.tries == 1:
                raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
            there._closed = True
            return 1

    there._receiver = there._subscriber = scripted = Scripted()  # type: ignore[assignment]
    there._keep_up()
    assert scripted.tries == 2
