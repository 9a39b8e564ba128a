"""A rollout instance: one engine, driven by commands and observed through reports.

::

    commands ──apply──> engine <──advance── (the runtime, between commands)
                          │ finished, interrupted, aborted, progress
                          v
                     take_report ──> InstanceReport (ids, lengths, versions) + deltas (the new tokens)

Invariants:

- commands take effect once each, in the order of their sequence numbers: repeated ones are skipped, ones for
  another incarnation are ignored, and a gap is an error that changes nothing;
- a trajectory runs only on weights of at least the `min_version` of its Route: a failed pull never produces
  old tokens under a newer reservation;
- the trajectory equals what the owner sent plus the deltas of all reports, in order: each token is reported
  exactly once, however often the trajectory is interrupted;
- a refused command only adds an entry to `rejections`; a failed pull leaves the old version loaded. Only an
  engine that fails in the middle of its work, or pulls that fail for too long, raise (EngineError): the
  runtime then considers the whole instance lost and generates unreported tokens anew elsewhere.

Single-threaded; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import NDArray

from staleflow.coordination.actions import Abort, Command, Interrupt, Pull, Route
from staleflow.coordination.events import InstanceReport, Rejection, TrajectoryReport
from staleflow.data.instance_update import Delta, InstanceUpdate
from staleflow.data.trajectory import Trajectory
from staleflow.errors import EngineError, ProtocolError, TransportError
from staleflow.rollout.engine import Engine, OnPull, segment_after

PULL_PATIENCE_S = 60.0
"""An instance that cannot pull refuses all new groups, so it fails after this long, to be restarted."""


class OnItsWay(TransportError):
    """The version has not reached this node yet."""


class LeasedWeights(Protocol):
    """A whole weight version, pinned while the lease is open."""

    @property
    def version(self) -> int:
        """Its weight version."""
        ...

    @property
    def tensors(self) -> Mapping[str, NDArray[Any]]:
        """Read-only arrays by state-dict name."""
        ...


class WeightSource(Protocol):
    """Source of pulled weights; the parameter server's `Subscriber` is one."""

    def newest(self) -> int | None:
        """Newest version available, None before the first push."""
        ...

    def lease(self, version: int | None = None) -> AbstractContextManager[LeasedWeights]:
        """Pin a version (None: the newest). Raises TransportError if it is not available."""
        ...


class RolloutInstance:
    """Applies commands to `engine` and reports the results.

    `instance` and `incarnation` are the ones that commands must name. `clock` returns seconds;
    `progress_interval_s` is the period for reporting tokens of trajectories that are still running.
    `transfer_limit_s` limits how long weights may take to reach this node.
    """

    def __init__(
        self,
        *,
        instance: str,
        incarnation: int,
        engine: Engine,
        subscriber: WeightSource,
        on_pull: OnPull,
        clock: Callable[[], float],
        progress_interval_s: float,
        transfer_limit_s: float = PULL_PATIENCE_S,
    ) -> None:
        self._instance = instance
        self._incarnation = incarnation
        self._engine = engine
        self._subscriber = subscriber
        self._on_pull: OnPull = on_pull
        self._clock = clock
        self._progress_interval_s = progress_interval_s
        self._transfer_limit_s = transfer_limit_s
        self._progress_at = clock() + progress_interval_s
        self._acked_seq = 0
        self._revision = 0
        self._busy_seconds = 0.0
        self._pulls = 0
        self._rebuilt_tokens = 0
        self._command_seconds: dict[type[Command], float] = dict.fromkeys(
            (Route, Interrupt, Abort, Pull), 0.0
        )
        self._refusing_since: float | None = None  # time of the first of consecutive failed pulls
        self._seen: dict[str, int] = {}  # response tokens reported so far, by trajectory held
        self._news = False
        self._reported_idle = True
        self._start_report()

    def _start_report(self) -> None:
        self._rejections: list[Rejection] = []
        self._finished: list[TrajectoryReport] = []
        self._interrupted: list[TrajectoryReport] = []
        self._aborted: list[str] = []
        self._deltas: list[Delta] = []
        self._news = False

    @property
    def version(self) -> int:
        """Loaded weight version."""
        return self._engine.version

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to decode until the next Route."""
        load = self._engine.load()
        return load.running + load.waiting == 0

    @property
    def has_news(self) -> bool:
        """True if a report would contain something new."""
        if self._news:
            return True
        # An engine that lost its last trajectory is idle without one that finished: the owner must learn it.
        return not self._reported_idle if self.is_idle else self._progress_due

    @property
    def _progress_due(self) -> bool:
        return self._clock() >= self._progress_at

    def apply(self, commands: Sequence[Command], payloads: Mapping[str, Trajectory]) -> None:
        """Apply commands in sequence order; `payloads` holds the trajectories of the Routes.

        Raises ProtocolError, having applied none, if a sequence number is skipped or a command names another
        instance; EngineError if the engine fails.
        """
        for command in self._fresh(commands):
            started = self._clock()
            match command:
                case Route():
                    self._route(command, payloads.get(command.trajectory_id))
                case Interrupt():
                    for trajectory in self._engine.interrupt([command.trajectory_id]):
                        self._interrupted.append(self._leaves(trajectory))
                case Abort():
                    for trajectory in self._engine.abort([command.trajectory_id]):
                        self._aborted.append(self._leaves(trajectory).trajectory_id)
                case Pull():
                    self._pull(command)
            self._command_seconds[type(command)] += self._clock() - started
            self._acked_seq = command.seq
            self._news = True

    def _fresh(self, commands: Iterable[Command]) -> list[Command]:
        fresh: list[Command] = []
        for command in commands:
            if command.instance != self._instance:
                raise ProtocolError(f"{self._instance} received a command for {command.instance}")
            expected = self._acked_seq + len(fresh) + 1
            if command.incarnation != self._incarnation or command.seq < expected:
                continue
            if command.seq > expected:
                raise ProtocolError(f"{self._instance} expected command {expected}, got {command.seq}")
            fresh.append(command)
        return fresh

    def _route(self, command: Route, payload: Trajectory | None) -> None:
        if payload is None:
            self._reject(command.seq, command.trajectory_id, "the Route came without its trajectory")
        elif self._engine.version < command.min_version:
            reason = f"version {self._engine.version} is older than {command.min_version}"
            self._reject(command.seq, command.trajectory_id, reason, stale_version=True)
        else:
            try:
                self._engine.add(payload)
            except EngineError as refusal:
                self._reject(command.seq, command.trajectory_id, str(refusal))
            else:
                self._seen[payload.trajectory_id] = payload.response_len

    def _pull(self, command: Pull) -> None:
        """Load the newest weights, or keep the current ones and reject the command with the reason."""
        started = self._clock()
        before = self._engine.version
        try:
            with self._subscriber.lease() as lease:
                if lease.version < command.version:
                    raise OnItsWay(f"the newest available version is {lease.version}, not {command.version}")
                # An earlier pull may have loaded a newer version than it asked for.
                if lease.version > before:
                    self._engine.load_weights(lease.tensors, lease.version, self._on_pull)
                    self._pulls += 1
                    if self._on_pull == "recompute":
                        self._rebuilt_tokens += self._engine.load().kv_tokens
        except (TransportError, EngineError) as failure:
            if self._engine.version != before:
                raise  # failed after the swap: the old version is gone and the new one does not work
            self._reject(command.seq, None, str(failure))
            limit_s = self._transfer_limit_s if isinstance(failure, OnItsWay) else PULL_PATIENCE_S
            if self._refusing_since is None:
                self._refusing_since = started
            elif started - self._refusing_since > limit_s:
                raise EngineError(
                    f"{self._instance} could not pull for {limit_s:.0f} s: {failure}"
                ) from failure
        except Exception as error:
            raise EngineError(f"{self._instance} failed while loading weights: {error!r}") from error
        else:
            self._refusing_since = None

    def _reject(
        self, seq: int, trajectory_id: str | None, reason: str, *, stale_version: bool = False
    ) -> None:
        self._rejections.append(
            Rejection(seq=seq, trajectory_id=trajectory_id, reason=reason, stale_version=stale_version)
        )

    def advance(self) -> None:
        """One decode step, if there is anything to decode. Raises EngineError if the engine fails."""
        load = self._engine.load()
        if load.running + load.waiting == 0:
            return
        started = self._clock()
        try:
            finished = self._engine.step()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the engine of {self._instance} failed: {error!r}") from error
        elapsed = self._clock() - started
        after = self._engine.load()
        if after.decode_seconds is not None:
            self._busy_seconds = after.decode_seconds
        elif after.decode_steps > load.decode_steps:
            self._busy_seconds += elapsed
        for trajectory in finished:
            self._finished.append(self._leaves(trajectory))
            self._news = True

    def _leaves(self, trajectory: Trajectory) -> TrajectoryReport:
        self._add_delta(trajectory, self._seen.pop(trajectory.trajectory_id))
        return TrajectoryReport(
            trajectory_id=trajectory.trajectory_id,
            length=trajectory.length,
            min_version=trajectory.min_version,
            finish_reason=trajectory.finish_reason,
        )

    def _add_delta(self, trajectory: Trajectory, seen: int) -> None:
        self._deltas.append(
            Delta(
                trajectory_id=trajectory.trajectory_id,
                segment=segment_after(trajectory, seen),
                finish_reason=trajectory.finish_reason,
            )
        )

    def take_report(self) -> InstanceUpdate:
        """Everything since the last report. Acknowledges all commands applied so far."""
        lengths = self._progress() if self._progress_due else ()
        load = self._engine.load()
        self._revision += 1
        self._reported_idle = load.running + load.waiting == 0
        report = InstanceReport(
            instance=self._instance,
            incarnation=self._incarnation,
            revision=self._revision,
            version=self._engine.version,
            acked_seq=self._acked_seq,
            rejections=tuple(self._rejections),
            finished=tuple(self._finished),
            interrupted=tuple(self._interrupted),
            aborted=tuple(self._aborted),
            lengths=lengths,
            running=load.running,
            waiting=load.waiting,
            kv_tokens=load.kv_tokens,
            kv_capacity=load.kv_capacity,
            preemptions=load.preemptions,
            generated_tokens=load.generated_tokens,
            busy_seconds=self._busy_seconds,
            pull_seconds=self._command_seconds[Pull],
            rebuilt_tokens=self._rebuilt_tokens,
            pulls=self._pulls,
            interrupt_seconds=self._command_seconds[Interrupt],
            abort_seconds=self._command_seconds[Abort],
            route_seconds=self._command_seconds[Route],
            decode_steps=load.decode_steps,
            running_steps=load.running_steps,
            kv_token_steps=load.kv_token_steps,
            prefilled_tokens=load.prefilled_tokens,
        )
        update = InstanceUpdate(report=report, deltas=tuple(self._deltas))
        self._start_report()
        return update

    def _progress(self) -> tuple[tuple[str, int], ...]:
        """Add the new tokens of trajectories still held; returns the lengths of those that grew."""
        self._progress_at = self._clock() + self._progress_interval_s
        lengths = []
        for trajectory_id, trajectory in self._engine.trajectories().items():
            seen = self._seen[trajectory_id]
            if trajectory.response_len > seen:
                self._add_delta(trajectory, seen)
                self._seen[trajectory_id] = trajectory.response_len
                lengths.append((trajectory_id, trajectory.length))
        return tuple(lengths)
