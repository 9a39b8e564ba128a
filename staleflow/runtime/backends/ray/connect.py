"""Connects to Ray: to an existing cluster, or to a local one that it starts.

Invariant: an address where nothing listens is refused within seconds.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.errors import ConfigError, RunFailed

PROBE_LIMIT_S = 5.0
"""Reaching a port on another continent takes a third of a second. Ray itself tries for more than a minute."""


def connect(config: Config) -> None:
    """Start a local cluster, or connect to the one at cluster.address.

    Raises ConfigError for an invalid address, RunFailed if no cluster answers there.
    """
    address = config.cluster.address
    if address is not None:
        probe(address)
        use_token()  # before the import of ray, which reads it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers inherit the environment of a local cluster: one thread each, unless a part sets more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"address": "local", "include_dashboard": False}
    else:
        options |= {"address": address}
        if config.cluster.ship:
            options["runtime_env"] = {"py_modules": [str(Path(p).expanduser()) for p in config.cluster.ship]}
    try:
        ray.init(**options)
    except ValueError as error:
        raise ConfigError(f"cluster.address is {address!r}: {error}") from error
    except ConnectionError as error:
        raise RunFailed(
            f"no Ray cluster answers at cluster.address {address!r}, or it expects another token than the "
            f"one in ~/.ray/auth_token: {str(error).splitlines()[0]}"
        ) from error


def probe(address: str) -> None:
    """Check that something listens at `host:port`. Raises RunFailed, or ConfigError for a wrong port."""
    host, colon, port = address.rpartition(":")
    host = host.rpartition("//")[2].strip("[]")
    if not colon or not host:
        return  # "auto", or an address that Ray will reject itself
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"cluster.address is {address!r}: {port!r} is not a port; write host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_LIMIT_S).close()
    except OSError as error:
        raise RunFailed(
            f"nothing listens at cluster.address {address!r} ({error.strerror or error}): start a cluster "
            "there (ray start --head), or correct the address"
        ) from error


def use_token() -> None:
    """Send Ray's token to an existing cluster if a token exists and the environment sets no other mode.

    `ray start` requires a token by default; `ray.init` with an address sends it only in token mode. A cluster
    started without a token accepts a process that sends one but cannot call it: set RAY_AUTH_MODE=disabled.
    """
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if given or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
