"""Weights on their way to another node, with both ends in this process and a wire that breaks when told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from staleflow.errors import TransportError
from staleflow.servers.parameter_server import ParameterServer
from staleflow.servers.replication import TICKET_LIMIT_S, Offer, Receiver, Sender
from staleflow.servers.shared_memory import SharedMemoryHandle

PIECE = 100
"""Bytes: no tensor begins or ends with a piece."""


def weights(version: int) -> dict[str, NDArray[Any]]:
    return {
        "a": np.full((9, 11), version, np.float32),
        "b": np.full(3, version, np.uint16),
        "c": np.full((), version, np.float64),
    }


class Wire:
    """A sender as seen from elsewhere. `before_piece(n)` may do anything, also break it."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.before_piece: Callable[[int], object] = lambda _: None
        self.sent = 0

    def open(self, reader: str, version: int | None) -> Offer:
        return self.sender.open(reader, version)

    def pieces(self, offer: Offer) -> Iterator[NDArray[np.uint8]]:
        for index in range(offer.pieces):
            self.before_piece(index)
            self.sent += 1
            yield self.sender.piece(offer.ticket, index)[1].copy()

    def done(self, ticket: str) -> None:
        self.sender.done(ticket)


class Nodes:
    """A source and another node."""

    def __init__(self, source: SharedMemoryHandle, other: SharedMemoryHandle) -> None:
        self.now = 0.0
        self.source = source
        self.publisher = source.publisher()
        sender = Sender(source.subscriber(), piece_bytes=PIECE, clock=lambda: self.now)
        self.wire = Wire(sender)
        self.subscriber = other.subscriber()
        self.receiver = Receiver("other", self.wire, other.publisher())

    def segments(self) -> int:
        return len(list(Path(self.source.folder).glob("segment-*")))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with (
        ParameterServer(directory=str(tmp_path), run_name="source") as source,
        ParameterServer(directory=str(tmp_path), run_name="other") as other,
    ):
        assert isinstance(source.handle, SharedMemoryHandle)
        assert isinstance(other.handle, SharedMemoryHandle)
        yield Nodes(source.handle, other.handle)


def assert_shows(nodes: Nodes, version: int, newest: bool = True) -> None:
    with nodes.subscriber.lease(None if newest else version) as lease:
        assert lease.version == version
        assert list(lease.tensors) == ["a", "b", "c"]
        for name, expected in weights(version).items():
            np.testing.assert_array_equal(lease.tensors[name], expected)


def test_a_version_arrives_as_it_was_pushed(nodes: Nodes) -> None:
    for version in range(4):
        nodes.publisher.push(version, weights(version))
        assert nodes.receiver.bring_newest(nodes.subscriber.newest()) == version
        assert_shows(nodes, version)
    assert nodes.segments() == 2, "a transfer that is over pins nothing"


def test_what_is_here_already_is_not_sent_again(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))
    nodes.receiver.bring_newest(None)
    sent = nodes.wire.sent
    assert nodes.receiver.bring_newest(0) == 0
    assert nodes.wire.sent == sent


def test_before_the_first_push_there_is_nothing_to_bring(nodes: Nodes) -> None:
    with pytest.raises(TransportError, match="no weights were pushed yet"):
        nodes.receiver.bring_newest(None)


def test_a_transfer_that_breaks_leaves_the_old_version_and_the_next_one_succeeds(nodes: Nodes) -> None:
    """F36, on the way to a node: after any number of pieces."""
    nodes.publisher.push(0, weights(0))
    nodes.receiver.bring_newest(None)

    def cut(after: int, index: int) -> None:
        if index == after:
            raise TransportError("the wire is cut")

    for version, after in enumerate((0, 1, 2, 3), start=1):
        nodes.wire.before_piece = partial(cut, after)
        nodes.publisher.push(version, weights(version))
        with pytest.raises(TransportError, match="the wire is cut"):
            nodes.receiver.bring_newest(0)
        assert_shows(nodes, 0)
    nodes.wire.before_piece = lambda _: None
    assert nodes.receiver.bring_newest(0) == 4
    assert_shows(nodes, 4)


def test_pushes_during_a_transfer_neither_wait_for_it_nor_tear_it(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))
    pushed = iter(range(1, 100))

    def push(_: int) -> None:
        version = next(pushed)
        nodes.publisher.push(version, weights(version))

    nodes.wire.before_piece = push
    assert nodes.receiver.bring_newest(None) == 0
    assert_shows(nodes, 0)
    assert nodes.segments() == 3, "the one being sent, the newest and the one being written"


def test_a_reader_on_the_other_node_keeps_its_version_while_newer_ones_arrive(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))
    nodes.receiver.bring_newest(None)
    with nodes.subscriber.lease() as lease:
        for version in (1, 2, 3):
            nodes.publisher.push(version, weights(version))
            nodes.receiver.bring_newest(version - 1)
        assert np.all(lease.tensors["a"] == 0)
        assert_shows(nodes, 3)


def test_a_held_version_is_brought_behind_a_newer_one_and_goes_with_its_lease(nodes: Nodes) -> None:
    """Evaluation on a node that has gone on, or never had the version."""
    nodes.publisher.push(0, weights(0))
    held = nodes.publisher.hold(0)
    for version in (1, 2):
        nodes.publisher.push(version, weights(version))
    nodes.receiver.bring_newest(None)
    with nodes.receiver.bring_older(0) as older:
        assert older.version == 0
        assert_shows(nodes, 0, newest=False)
        assert_shows(nodes, 2)
        nodes.publisher.push(3, weights(3))
        nodes.receiver.bring_newest(2)
        assert_shows(nodes, 0, newest=False)
    held.release()
    for version in (4, 5):
        nodes.publisher.push(version, weights(version))
        nodes.receiver.bring_newest(version - 1)
    with pytest.raises(TransportError, match="version 0 is gone"):
        nodes.subscriber.lease(0)


def test_a_node_that_is_never_heard_of_again_costs_one_segment_and_that_not_for_ever(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))
    dead = nodes.wire.open("dead", None)
    for version in (1, 2, 3):
        nodes.publisher.push(version, weights(version))
    assert nodes.segments() == 3
    assert nodes.wire.sender.piece(dead.ticket, 0)[0] == 0
    nodes.now += TICKET_LIMIT_S + 1
    nodes.receiver.bring_newest(None)
    with pytest.raises(TransportError, match="the transfer dead/1 is over"):
        nodes.wire.sender.piece(dead.ticket, 0)
    before = nodes.segments()
    for version in (4, 5, 6):
        nodes.publisher.push(version, weights(version))
    assert nodes.segments() == before


def test_a_node_that_begins_anew_ends_what_it_had_begun(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))
    first = nodes.wire.open("other", None)
    second = nodes.wire.open("other", None)
    with pytest.raises(TransportError, match="is over"):
        nodes.wire.sender.piece(first.ticket, 0)
    nodes.wire.done(second.ticket)
    nodes.wire.done(second.ticket)
    assert nodes.wire.sender.is_idle


def test_a_transfer_that_ends_early_is_an_error(nodes: Nodes) -> None:
    nodes.publisher.push(0, weights(0))

    class Short(Wire):
        def pieces(self, offer: Offer) -> Iterator[NDArray[np.uint8]]:
            yield from list(super().pieces(offer))[:-1]

    nodes.receiver._sender = Short(nodes.wire.sender)
    with pytest.raises(TransportError, match=r"only \d+ of \d+ bytes arrived"):
        nodes.receiver.bring_newest(None)
    assert nodes.subscriber.newest() is None
