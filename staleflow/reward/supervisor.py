"""The loop that feeds the workers, collects their answers and kills them at their limits.

Invariants:

- an item is in exactly one place: incoming, queue, or assigned to one worker; it leaves when answered;
- if a worker hangs, crashes or is worn, the first of its items is answered and never retried; the items
  behind it return to the front of the queue;
- an answer written before the limit counts, however late it is read;
- when no worker can be started, all items are answered `failed` and new ones are refused.

Only the loop's thread starts workers (see `worker_process`) and touches them and the queue.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from staleflow.errors import ConfigError, RunFailed
from staleflow.reward.outcome import Status, VerifierOutcome
from staleflow.reward.worker_process import Item, WorkerProcess

_BATCH_SECONDS = 0.05
"""Approximate duration of a batch: cheap items share a message, and expensive ones do not wait behind each
other while another worker is idle."""
_BATCH_LIMIT = 128
_MEAN_WEIGHT = 0.05
"""Weight of the latest item in the running mean of seconds per item."""
_START_ATTEMPTS = 3
"""Failed starts in a row that end the pool: one may be bad luck (memory, a busy machine), three are not."""


class Supervisor:
    """Runs workers from construction to `stop`."""

    def __init__(
        self,
        start_worker: Callable[[], WorkerProcess],
        *,
        workers: int,
        timeout_s: float,
        answer: Callable[[Item, VerifierOutcome], None],
        on_broken: Callable[[], None],
    ) -> None:
        """`answer` is called from the loop's thread, once for each item; `on_broken` after the last one.

        Returns when all workers have loaded the verifier. Raises ConfigError if one cannot load it.
        """
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._answer = answer
        self._on_broken = on_broken
        self._lock = threading.Lock()  # so that nothing is submitted to _incoming after the end
        self._incoming: list[Item] = []
        self._queue: deque[Item] = deque()
        self._workers: list[WorkerProcess] = []
        self._mean_s = _BATCH_SECONDS
        self._failed_starts = 0
        self._stopping = False
        self._settled = threading.Event()
        self.broken = ""
        """Why no worker can be started; empty while the pool works."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, args=(workers,), name="reward-pool", daemon=True)
        self._thread.start()
        self._settled.wait()
        if self.broken:
            self.stop()
            raise ConfigError(self.broken)

    def submit(self, items: Sequence[Item]) -> None:
        """Queue items. Raises RunFailed, queueing none, if no worker can be started."""
        with self._lock:
            if self.broken:
                raise RunFailed(self.broken)
            self._incoming.extend(items)
        self._wake_up()

    def stop(self) -> None:
        """Kill all workers; open items stay unanswered. May be called twice."""
        if not self._stopping:
            self._stopping = True
            self._wake_up()
            self._thread.join()
            os.close(self._woken)
            os.close(self._wake)

    def pids(self) -> list[int]:
        """Process ids of the current workers."""
        return [worker.pid for worker in list(self._workers)]

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake, b"x")

    # ---- the loop's thread

    def _run(self, workers: int) -> None:
        try:
            for _ in range(workers):
                self._workers.append(self._start_worker())
            while not self._stopping and not self.broken:
                self._dispatch()
                self._wait()
                for worker in list(self._workers):
                    self._attend(worker)
        except Exception as error:
            self._break(f"the reward workers failed: {type(error).__name__}: {error}")
        finally:
            for worker in self._workers:
                worker.kill()
            self._workers = []
            self._settled.set()

    def _dispatch(self) -> None:
        """Give idle workers their batches."""
        with self._lock:
            self._queue.extend(self._incoming)
            self._incoming.clear()
        for worker in self._workers:
            # A worker that ended while idle is replaced in `_attend`, without blaming an item.
            if self._queue and worker.ready and not worker.assigned and not worker.has_exited():
                share = math.ceil(len(self._queue) / len(self._workers))
                size = min(max(1, int(_BATCH_SECONDS / self._mean_s)), _BATCH_LIMIT, share)
                worker.assign([self._queue.popleft() for _ in range(size)])
                worker.deadline = time.monotonic() + self._timeout_s

    def _wait(self) -> None:
        """Wait until items are submitted, a worker writes, can read or ends, or a deadline is reached."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        for worker in self._workers:
            poller.register(worker.results, select.POLLIN)
            poller.register(worker.exit, select.POLLIN)
            if worker.wants_to_send:
                poller.register(worker.requests, select.POLLOUT)
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        rest_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        poller.poll(None if rest_s is None else math.ceil(rest_s * 1000))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)

    def _attend(self, worker: WorkerProcess) -> None:
        """Read a worker's answers, then replace it if necessary."""
        worker.send_rest()
        # Check the exit and the time first, so that no answer written before them is missed.
        exited, now = worker.has_exited(), time.monotonic()
        for answer in worker.receive():
            self._take(worker, answer)
        if worker.worn:
            self._replace(worker, None)
        elif exited:
            self._replace(worker, "crash")
        elif worker.deadline is not None and now >= worker.deadline:
            self._replace(worker, "timeout")

    def _take(self, worker: WorkerProcess, answer: list[Any]) -> None:
        match answer:
            case ["ready"]:
                worker.ready, worker.deadline, self._failed_starts = True, None, 0
                if all(each.ready for each in self._workers):
                    self._settled.set()
            case ["failed", message]:
                worker.start_error = message
            case ["result", number, status, raw, seconds, message, worn]:
                if not worker.assigned or worker.assigned[0].number != number:
                    return
                item = worker.assigned.popleft()
                worker.worn = worn
                worker.deadline = time.monotonic() + self._timeout_s if worker.assigned else None
                self._mean_s += _MEAN_WEIGHT * (seconds - self._mean_s)
                self._answer(item, VerifierOutcome(status=status, raw=raw, seconds=seconds, message=message))

    def _replace(self, worker: WorkerProcess, status: Status | None) -> None:
        """Kill a worker and start another. `status`: outcome of its first item; None: the item is retried."""
        self._workers.remove(worker)
        ended = worker.kill()
        if not worker.ready:
            self._failed_starts += 1
            reason = (
                f"a worker {'took too long to load' if status == 'timeout' else 'died loading'} it ({ended})"
            )
            if not self._settled.is_set() or self._failed_starts >= _START_ATTEMPTS:
                self._break(worker.start_error or f"the verifier cannot be used: {reason}")
                return
        elif status is not None and worker.assigned:
            seconds = self._timeout_s + time.monotonic() - (worker.deadline or 0.0)
            self._answer(
                worker.assigned.popleft(),
                VerifierOutcome(status=status, seconds=seconds, message=f"worker {ended}"),
            )
        self._queue.extendleft(reversed(worker.assigned))
        self._workers.append(self._start_worker())

    def _break(self, reason: str) -> None:
        with self._lock:
            left = [item for worker in self._workers for item in worker.assigned]
            for item in [*left, *self._queue, *self._incoming]:
                self._answer(item, VerifierOutcome(status="failed", message=reason))
            self._queue.clear()
            self._incoming.clear()
            for worker in self._workers:
                worker.assigned.clear()
            self.broken = reason
        self._on_broken()
