"""What is looked at before Ray is asked to connect."""

from __future__ import annotations

import socket
import time

import pytest

from staleflow.errors import ConfigError, RunFailed
from staleflow.runtime.backends.ray.connect import probe


def free_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}"])
def test_an_address_where_nothing_listens_is_refused_in_seconds(form: str) -> None:
    """Ray itself tries for more than a minute."""
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"nothing listens at cluster\.address .* \(Connection refused\)"):
        probe(form.format(free_port()))
    assert time.monotonic() - began < 6


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["127.0.0.1:ray", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:"])
def test_a_port_that_is_none_is_the_persons_error(address: str) -> None:
    with pytest.raises(ConfigError, match="is not a port; write host:port, or auto"):
        probe(address)


def test_auto_is_for_ray_to_find() -> None:
    probe("auto")
