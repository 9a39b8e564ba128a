"""A run on Ray: the loop is an actor, every part is an actor, and the command only observes.

Invariants: when the session ends, nothing of the run remains on the cluster: its actors, placement group and
shared memory end with it, and so does a local cluster. Neither weights nor payload pass through the command's
process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from staleflow.errors import RunFailed, StaleflowError
from staleflow.runtime.backends.ray.actors import log_to
from staleflow.runtime.backends.ray.cluster import RayCluster
from staleflow.runtime.clock import Clock, SystemClock
from staleflow.runtime.loop import RunLoop
from staleflow.telemetry.monitor import RunMonitor
from staleflow.telemetry.rows import Row, RunStatus

LOOK_LIMIT_S = 60.0
"""The loop's process answers `look` from a separate thread; silence for this long means that it is dead."""


class TrajectoryServerActor:
    """Process with the run loop, `Control` and the trajectory server."""

    def __init__(
        self,
        logs: Path,
        make_monitor: Callable[[Clock], RunMonitor],
        make_loop: Callable[[RunMonitor, Clock], RunLoop[Any, Any]],
    ) -> None:
        """`make_loop` may take a while; `look` already answers meanwhile."""
        log_to(logs, "trajectory_server")
        self._clock = SystemClock()
        self._monitor = make_monitor(self._clock)
        self._make_loop = make_loop
        self._loop: RunLoop[Any, Any] | None = None
        self._stop_early = False

    def run(self) -> str:
        """Run to the end; returns the finish reason."""
        self._loop = self._make_loop(self._monitor, self._clock)
        if self._stop_early:
            self._loop.request_stop()
        try:
            reason = self._loop.run()
        except Exception:
            logging.getLogger(__name__).exception("the run loop ended")
            raise
        return reason

    def look(self) -> tuple[list[Row], RunStatus]:
        """Rows since the last call, and the newest status."""
        return self._monitor.take_rows(), self._monitor.status

    def request_stop(self) -> None:
        """Finish the step in training, save, and end."""
        self._stop_early = True
        if self._loop is not None:
            self._loop.request_stop()


class RaySession:
    """See `session.Session`. It owns the cluster: `close` ends both."""

    def __init__(
        self,
        cluster: RayCluster,
        *,
        logs: Path,
        make_monitor: Callable[[Clock], RunMonitor],
        make_loop: Callable[[RunMonitor, Clock], RunLoop[Any, Any]],
        start_timeout_s: float,
    ) -> None:
        """Start the actor that runs the loop; it makes monitor and loop in its own process."""
        self._cluster = cluster
        options = {**cluster.placement.options("servers"), "concurrency_groups": {"loop": 1, "look": 1}}
        make: Any = ray.remote(**options)(TrajectoryServerActor)
        self._actor: Any = make.remote(logs, make_monitor, make_loop)
        self._result = self._actor.run.options(concurrency_group="loop").remote()
        self._look: Any = None
        self._answered = False
        self._closed = False
        self._silent_s = 0.0
        self._limit_s = max(LOOK_LIMIT_S, start_timeout_s)  # until the process is up

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Ask the loop's process for rows and status; a late answer comes with a later call."""
        if self._look is None:
            self._look = self._actor.look.options(concurrency_group="look").remote()
        # Also wait for the end of the run, to notice it at once and to space out the calls.
        ray.wait([self._result], timeout=timeout_s)
        ready, _ = ray.wait([self._look], timeout=timeout_s)
        if not ready:
            self._silent_s += 2 * timeout_s
            if self._silent_s > self._limit_s:
                raise RunFailed("the run loop's process does not answer; see the logs folder of the run")
            return [], None
        self._silent_s, self._limit_s = 0.0, LOOK_LIMIT_S
        reference, self._look = self._look, None
        try:
            rows, status = ray.get(reference)
        except ray.exceptions.RayError:
            return [], None  # `outcome` reports the reason
        self._answered = True
        return rows, status

    def request_stop(self) -> None:
        """Pass the request on to the loop's process."""
        self._actor.request_stop.options(concurrency_group="look").remote()

    def outcome(self) -> str | None:
        """See `Session`."""
        ready, _ = ray.wait([self._result], timeout=0)
        if not ready:
            return None
        try:
            reason: str = ray.get(self._result)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StaleflowError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise RunFailed(f"the run loop's process died: {type(error).__name__}{self._hint()}") from error
        return reason

    def _hint(self) -> str:
        """A likely cause if the process died before its first answer."""
        if self._answered or self._cluster.is_local:
            return ""
        return (
            " before the run started; if the cluster was started without a token and you have one "
            "(~/.ray/auth_token), set RAY_AUTH_MODE=disabled"
        )

    def close(self) -> None:
        """End the run's actors, and the cluster if it was started here."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        self._cluster.close()
