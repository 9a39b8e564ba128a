"""The host process, seen from its owner: start, exchange messages, end.

Invariants: a wait ends when the process dies and, during start-up, at a time limit; nothing of it remains
when it is closed or its owner is killed; the environment that vLLM needs is set in this process only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from staleflow.errors import ConfigError, EngineError
from staleflow.rollout.vllm.group import kill_group
from staleflow.rollout.vllm.messages import Broken, Close, EngineSetup, Ready, Refused

POLL_S = 0.5
"""A wait checks this often whether the process is alive; usually its death closes the pipe and ends the wait
at once."""
END_WAIT_S = 5.0
"""Time limit for a clean shutdown."""


class HostProcess:
    """vLLM built from `setup` in a process with `threads` CPU threads. `log`: file for output; None drops it.

    Raises EngineError if it is not up within `limit_s`, ConfigError for settings that vLLM refuses.
    """

    def __init__(self, setup: EngineSetup, *, threads: int, log: Path | None, limit_s: float) -> None:
        self._log = log
        self._pipe, theirs = Pipe()
        held, self._lifeline = os.pipe()  # the host holds the read end and sees when ours closes
        output: int | IO[bytes] = subprocess.DEVNULL if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "staleflow.rollout.vllm.host", str(theirs.fileno()), str(held)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, threads),
                pass_fds=(theirs.fileno(), held),
                start_new_session=True,  # its own process group, which Ctrl-C does not reach
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(held)
            if not isinstance(output, int):
                output.close()
        try:
            self.send(setup)
            self.ready = self._started(limit_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    def _started(self, limit_s: float) -> Ready:
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(POLL_S):
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM did not start within {limit_s:.0f} s{self._see_log()}")
        answer = self.receive()
        if isinstance(answer, Refused):
            raise ConfigError(answer.reason)
        assert isinstance(answer, Ready)
        return answer

    def send(self, message: Any) -> None:
        """Send a message. Raises EngineError if the process is dead."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._dead() from error

    def receive(self) -> Any:
        """Wait for the next message. Raises EngineError if the process failed or died."""
        try:
            while not self._pipe.poll(POLL_S):
                self._check_alive()
            message = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if isinstance(message, Broken):
            raise EngineError(f"vLLM failed: {message.reason}{self._see_log()}")
        return message

    def _check_alive(self) -> None:
        if self._process.poll() is not None and not self._pipe.poll(0):
            raise self._dead()

    def _dead(self) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_S)  # the pipe may close shortly before the process ends
        code = self._process.poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return EngineError(f"the vLLM process died ({how}){self._see_log()}")

    def _see_log(self) -> str:
        return "" if self._log is None else f"; see {self._log}"

    def close(self) -> None:
        """Shut it down cleanly, or else kill it. May be called twice."""
        if self._process.poll() is None:
            with contextlib.suppress(EngineError, subprocess.TimeoutExpired):
                self.send(Close())
                self._process.wait(END_WAIT_S)
        self.kill()

    def kill(self) -> None:
        """Kill it and everything that it started. May be called twice."""
        kill_group(self._process.pid)
        self._process.wait()
        self._pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def environment(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """Environment of the host process: offline, no usage statistics, `threads` CPU threads."""
    paths = [str(Path(entry or ".").resolve()) for entry in sys.path]
    unset = {"VLLM_CPU_KVCACHE_SPACE"}  # an argument sets the size of the cache, in blocks
    return {
        **{name: value for name, value in inherited.items() if name not in unset},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the host itself
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
