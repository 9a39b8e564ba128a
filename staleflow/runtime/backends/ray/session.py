"""A run on Ray: the loop in an actor, every part an actor of its own, the command only looks on.

Invariants: without an address a local cluster is started, and it ends with the session, whatever happens;
with one, nothing of the run is left there: its actors and its placement group end with the session, and what
it has in shared memory ends with its actors. Neither weights nor payload pass through the command's process.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from staleflow.config.schema import Config
from staleflow.errors import RunFailed, StaleflowError
from staleflow.runtime.assembly import (
    build_control,
    build_source,
    build_tokenizer,
    build_trajectory_server,
)
from staleflow.runtime.backends.ray.connect import check_nodes, connect
from staleflow.runtime.backends.ray.placement import Placement, make_placement
from staleflow.runtime.clock import SystemClock
from staleflow.runtime.session import RunPaths, loop_settings, make_journal, make_observer
from staleflow.runtime.start import StartPoint
from staleflow.telemetry.rows import Row, RunStatus

LOOK_LIMIT_S = 60.0
"""The loop's process answers looks from a thread of its own; silence for this long means that it is gone."""


class TrajectoryServerActor:
    """The run loop with `Control` and the trajectory server, in one process."""

    def __init__(self, config: Config, start: StartPoint, paths: RunPaths, placement: Placement) -> None:
        from staleflow.runtime.backends.ray.actors import log_to

        log_to(paths.logs, "trajectory_server")
        self._config = config
        self._start = start
        self._paths = paths
        self._placement = placement
        self._clock = SystemClock()
        self._observer = make_observer(config, paths, self._clock)
        self._loop: Any = None
        self._stop_early = False

    def run(self) -> str:
        """Run to the end; returns the finish reason."""
        from staleflow.data.environment import SingleTurn
        from staleflow.runtime.backends.ray.backend import RayBackend
        from staleflow.runtime.gc_tuning import Heap
        from staleflow.runtime.loop import RunLoop
        from staleflow.storage.ledger import LedgerWriter

        config, start, paths = self._config, self._start, self._paths
        self._loop = RunLoop(
            control=build_control(config, start),
            server=build_trajectory_server(config, build_source(config, build_tokenizer(config)), start),
            environment=SingleTurn(),
            backend=RayBackend(
                config,
                start,
                run_name=paths.name,
                checkpoints=paths.checkpoints,
                logs=paths.logs,
                clock=self._clock,
                placement=self._placement,
            ),
            ledger=LedgerWriter(paths.ledger),
            opening=start.opening,
            observer=self._observer,
            clock=self._clock,
            settings=loop_settings(config),
            journal=make_journal(paths, start, self._observer, self._clock),
            heap=Heap(),
        )
        if self._stop_early:
            self._loop.request_stop()
        try:
            reason: str = self._loop.run()
        except Exception:
            logging.getLogger(__name__).exception("the run loop ended")
            raise
        return reason

    def look(self) -> tuple[list[Row], RunStatus]:
        """Rows since the last look, and the newest picture."""
        return self._observer.take_rows(), self._observer.status

    def request_stop(self) -> None:
        """Finish the step in training, save, and end."""
        self._stop_early = True
        if self._loop is not None:
            self._loop.request_stop()


class RaySession:
    """See `session.Session`."""

    def __init__(self, config: Config, start: StartPoint, paths: RunPaths) -> None:
        connect(config)
        import ray

        self._ray = ray
        self._placement = Placement()
        self._actor: Any = None
        self._closed = False
        self._config = config
        self._answered = False
        try:
            self._placement = make_placement(config)
            check_nodes(config, self._placement, paths.logs.parent)
        except BaseException:
            self.close()
            raise
        options = {**self._placement.options("servers"), "concurrency_groups": {"loop": 1, "look": 1}}
        make: Any = ray.remote(**options)(TrajectoryServerActor)
        self._actor = make.remote(config, start, paths, self._placement)
        self._result = self._actor.run.options(concurrency_group="loop").remote()
        self._look: Any = None
        self._silent_s = 0.0
        self._limit_s = max(LOOK_LIMIT_S, config.cluster.start_timeout_s)  # until the process is up

    def look(self, timeout_s: float) -> tuple[list[Row], RunStatus | None]:
        """Ask the loop's process; an answer that is late comes with a later look."""
        ray = self._ray
        if self._look is None:
            self._look = self._actor.look.options(concurrency_group="look").remote()
        # Wait for the end of the run as well, so that it is noticed at once; then space the looks out.
        ray.wait([self._result], timeout=timeout_s)
        ready, _ = ray.wait([self._look], timeout=timeout_s)
        if not ready:
            self._silent_s += 2 * timeout_s
            if self._silent_s > self._limit_s:
                raise RunFailed("the process of the run loop does not answer; see the logs folder of the run")
            return [], None
        self._silent_s, self._limit_s = 0.0, LOOK_LIMIT_S
        reference, self._look = self._look, None
        try:
            rows, status = ray.get(reference)
        except ray.exceptions.RayError:
            return [], None  # `outcome` says why
        self._answered = True
        return rows, status

    def request_stop(self) -> None:
        """Passed on."""
        self._actor.request_stop.options(concurrency_group="look").remote()

    def outcome(self) -> str | None:
        """See `Session`."""
        ray = self._ray
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
            raise RunFailed(
                f"the process of the run loop died: {type(error).__name__}{self._hint()}"
            ) from error
        return reason

    def _hint(self) -> str:
        """What else may be the matter where it died before it said anything."""
        if self._answered or self._config.cluster.address is None:
            return ""
        return (
            " before it began; if the cluster was started without a token and you have one "
            "(~/.ray/auth_token), set RAY_AUTH_MODE=disabled"
        )

    def close(self) -> None:
        """End the run's actors, and the cluster if it is ours."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            if self._actor is not None:
                self._ray.kill(self._actor)
            self._placement.remove()
        self._ray.shutdown()
