"""A cluster of several raylets on this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import ray
from test_ray_run import HERE, RUNTIME_TESTS

sys.path.insert(0, str(RUNTIME_TESTS))


ROOT = HERE.parent.parent
LIMIT_S = 240


class Cluster:
    """`scripts/local_cluster.py` under way."""

    def __init__(self, folder: Path) -> None:
        self.address_file = folder / "address"
        # Its processes take the parts of the tests from here, as nodes would from what is installed there.
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(RUNTIME_TESTS), str(HERE), *filter(None, given)]),
            "RAY_AUTH_MODE": "disabled",
        }
        self.output = folder / "cluster.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(ROOT / "scripts" / "local_cluster.py"),
                    "--address-file",
                    str(self.address_file),
                ],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self.address_file.exists, "the cluster", lambda: self.output.read_text())
        self.address = self.address_file.read_text()

    def raylet(self, number: int) -> psutil.Process:
        """The process of a node."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.ZombieProcess):  # one that was killed
                if process.name() == "raylet" and f"node_{number},4" in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no raylet of node {number}")

    def actors(self, number: int) -> set[str]:
        """Classes of the actors that are on a node."""
        found = set()
        for process in self.raylet(number).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if title.startswith("ray::"):
                    found.add(title.removeprefix("ray::").split(".")[0].split()[0])
        return found

    def add_node(self) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for process in [*family, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()


def wait_until(what: Callable[[], object], name: str, more: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"no {name} in {LIMIT_S} s: {more()}"
        time.sleep(0.1)


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[None]:
    """This process as a driver."""
    if ray.is_initialized():
        yield
        return
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
