"""Calls to Ray actors that are under way, and the messages that result when they end.

Invariant: only `poll` waits, and not beyond its time limit. A call ends once: with its result, with an error,
or when its time is up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from staleflow.errors import StaleflowError, UserError
from staleflow.runtime.backend import Message, PartFailed
from staleflow.runtime.clock import Clock

OnError = Callable[[str, bool], list[Message]]
"""Called with the reason, and whether the user's input is to blame."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    part: str
    on_result: Callable[[Any], list[Message]]
    on_error: OnError
    due: float
    late: str
    """The error message if there is no result by `due`."""


class Calls:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[Any, _Call] = {}

    def expect(
        self,
        reference: Any,
        part: str,
        on_result: Callable[[Any], list[Message]],
        *,
        on_error: OnError | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Watch the call `reference`, which has begun. Without `on_error`, the run fails if the call fails or
        takes longer than `limit_s`.
        """

        def failed(reason: str, blame_user: bool) -> list[Message]:
            return [PartFailed(part=part, reason=reason, blame_user=blame_user)]

        due, late = self._clock.now() + limit_s, f"no answer for {limit_s:.0f} s"
        self._calls[reference] = _Call(part, on_result, on_error or failed, due, late)

    def poll(self, timeout_s: float) -> list[Message]:
        """Wait for the first call to end, then process all that have ended."""
        waiting = list(self._calls)
        ready, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if ready and len(waiting) > 1:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        messages: list[Message] = []
        for reference in ready:
            messages += self._finish(reference, self._calls.pop(reference))
        now = self._clock.now()
        for reference in [r for r, call in self._calls.items() if call.due < now]:
            call = self._calls.pop(reference)
            messages += call.on_error(call.late, False)
        return messages

    def clear(self) -> None:
        """Forget all calls."""
        self._calls = {}

    def _finish(self, reference: Any, call: _Call) -> list[Message]:
        try:
            return call.on_result(ray.get(reference, timeout=0))
        except GetTimeoutError:
            return call.on_error("its answer was lost", False)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            _log.error("%s failed: %s", call.part, error)
            return call.on_error(_message(cause), isinstance(cause, UserError))
        except RayError as error:
            _log.error("%s failed: %s", call.part, error)
            return call.on_error(_death(error), False)


def _death(error: RayError) -> str:
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return str(error).strip().splitlines()[-1]  # the constructor's own exception
    return f"its process died ({type(error).__name__})"


def _message(error: Exception) -> str:
    text = str(error) or repr(error)
    return text if isinstance(error, StaleflowError) else f"{type(error).__name__}: {text}".splitlines()[0]
