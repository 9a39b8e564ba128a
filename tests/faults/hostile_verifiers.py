"""Verifiers that do what verifiers must not; the response says what."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable

from staleflow.reward.verifiers import ScoreRequest

_leak: list[bytearray] = []


def busy_loop(_: ScoreRequest) -> None:
    while True:
        pass


def c_level_sleep(_: ScoreRequest) -> None:
    ctypes.CDLL(None).sleep(1000)


def python_sleep(_: ScoreRequest) -> None:
    time.sleep(1000)


def power_tower(_: ScoreRequest) -> None:
    _ = 5 ** (5 ** (5**5))


def catches_everything(_: ScoreRequest) -> None:
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


def endless_allocation(_: ScoreRequest) -> None:
    while True:
        _leak.append(bytearray(10_000_000))


def hard_exit(_: ScoreRequest) -> None:
    os._exit(7)


def segfault(_: ScoreRequest) -> None:
    ctypes.string_at(0)


def closes_every_pipe(_: ScoreRequest) -> None:
    os.closerange(3, 256)
    time.sleep(1000)


def raises(_: ScoreRequest) -> None:
    raise KeyError("reward")


def bomb(request: ScoreRequest) -> None:
    """Forks children and grandchildren, one in a session of its own, that write their ids and stay."""
    script = (
        "import os, sys, time\n"
        "os.fork(); os.fork()\n"
        "if len(sys.argv) > 2: os.setsid() if os.getpid() != os.getsid(0) else None\n"
        "open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()\n"
        "time.sleep(1000)\n"
    )
    for extra in ([], ["own session"]):
        subprocess.Popen([sys.executable, "-S", "-c", script, str(request.answer), *extra])
    while len(os.listdir(request.answer)) < 8:
        time.sleep(0.01)


def bomb_and_hang(request: ScoreRequest) -> None:
    bomb(request)
    time.sleep(1000)


def bomb_and_return(request: ScoreRequest) -> float:
    bomb(request)
    return 1.0


def child_returns_too(_: ScoreRequest) -> float:
    os.fork()
    return 1.0


FAULTS: dict[str, Callable[[ScoreRequest], float | None]] = {
    f.__name__: f
    for f in (
        busy_loop,
        c_level_sleep,
        python_sleep,
        power_tower,
        catches_everything,
        endless_allocation,
        hard_exit,
        segfault,
        closes_every_pipe,
        raises,
        bomb_and_hang,
        bomb_and_return,
        child_returns_too,
    )
}


def score(request: ScoreRequest) -> float | None:
    """The fault named by the response, else exact match."""
    fault = FAULTS.get(request.response)
    return float(request.response == request.answer) if fault is None else fault(request)
