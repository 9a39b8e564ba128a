"""The vLLM engine, owner's side: it keeps the trajectories; vLLM itself runs in a separate process (`host`).

::

    add ──> waiting ──first token──> running ──ends──> finished: returned by step, forgotten
               ^                        │  │
               └──preempted, recompute──┘  └──> interrupt, abort: returned, forgotten

Invariants:

- trajectories, with every token that vLLM has reported, are held here. vLLM's process may die at any moment;
  the only effect is that this engine raises EngineError from then on;
- a token carries the version that was loaded when it was sampled: the host stamps each step, and no step is
  under way during an update;
- a request to vLLM is limited by the rest of the trajectory's budget, of `max_model_len` and of the KV
  capacity;
- a request's seed depends only on (run seed, trajectory id, position at which it is added). So do its tokens,
  unless rounding within the batch tips a draw. They differ from the torch engine's.

The host works one step ahead of `step`, so it does not wait while this process writes its reports.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staleflow.data.trajectory import FinishReason, Trajectory
from staleflow.errors import EngineError, TransportError
from staleflow.rollout.engine import EngineLoad, OnPull, SamplingParams
from staleflow.rollout.randomness import trajectory_key
from staleflow.rollout.scheduler import Generation, accepted
from staleflow.rollout.vllm.messages import (
    Add,
    DecodeStep,
    EngineSetup,
    Gain,
    Refused,
    Remove,
    Removed,
    Stepped,
    Updated,
    WeightsAt,
    WeightUpdate,
)
from staleflow.rollout.vllm.process import HostProcess
from staleflow.rollout.vllm.weight_checks import check_shapes, stored_shapes
from staleflow.servers.transport import Handle

STEPS_AHEAD = 1
"""Steps by which the host may be ahead."""


class VllmEngine:
    """Engine around vLLM for the model in folder `model`, without weights until `load_weights`.

    `weights`: where vLLM's workers lease a version; if None, or not picklable, tensors travel in a file in
    shared memory. `log`: file for vLLM's output; None discards it. `start_timeout_s` in seconds.
    `kv_capacity_tokens` is the size of the KV cache on a CPU; on a GPU `gpu_memory_utilization` decides.
    `options`: further arguments of vLLM's EngineArgs. Raises EngineError if vLLM does not start, ConfigError
    if it refuses the settings.
    """

    def __init__(
        self,
        model: Path,
        *,
        sampling: SamplingParams,
        seed: int,
        kv_capacity_tokens: int,
        max_running: int,
        version: int = -1,
        dtype: str = "float32",
        weights: Handle | None = None,
        threads: int = 1,
        tensor_parallel: int = 1,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool | None = None,
        prefix_caching: bool = True,
        options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 300.0,
        log: Path | None = None,
    ) -> None:
        self._sampling = sampling
        self._greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        self._seed = seed
        self._version = version
        self._stored = stored_shapes(model)
        self._tied = "lm_head.weight" not in self._stored
        self._handle = weights if _travels(weights) else None
        self._failure: str | None = None
        self._held: dict[str, Generation] = {}
        self._numbered: dict[int, Generation] = {}
        self._running: set[int] = set()
        self._finished: list[Trajectory] = []
        self._arrivals = 0
        self._asked = 0  # steps requested and not yet answered by the host
        self._idle = 0  # those of them that were requested before there was anything to decode
        self._preemptions = 0
        self._generated = 0
        self._decode_steps = 0
        self._running_steps = 0
        self._kv_token_steps = 0
        self._prefilled = 0
        self._decode_s = 0.0
        setup = EngineSetup(
            model=str(model),
            dtype=dtype,
            max_model_len=sampling.max_model_len,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running=max_running,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel=tensor_parallel,
            enforce_eager=enforce_eager,
            prefix_caching=prefix_caching,
            options=dict(options or {}),
        )
        self._host = HostProcess(setup, threads=threads, log=log, limit_s=start_timeout_s)
        self._capacity = self._host.ready.kv_capacity
        self._max_model_len = min(sampling.max_model_len, self._host.ready.max_model_len)

    @property
    def version(self) -> int:
        """Weight version loaded."""
        return self._version

    @property
    def host_pid(self) -> int:
        """Id of the process that holds vLLM, and of the process group that it starts."""
        return self._host.pid

    # ------------------------------------------------------------------ trajectories

    def add(self, trajectory: Trajectory, *, greedy: bool = False) -> None:
        """Queue a trajectory. Raises EngineError if this engine can never continue it."""
        self._check()
        if trajectory.trajectory_id in self._held:
            raise EngineError(f"trajectory {trajectory.trajectory_id} is already in this engine")
        generation, spent = accepted(
            trajectory,
            kv_capacity=self._capacity,
            max_model_len=self._max_model_len,
            order=self._arrivals,
            greedy=greedy,
        )
        self._arrivals += 1
        if spent:
            self._finished.append(trajectory.finished(FinishReason.LENGTH))
            return
        if not self._held:
            self._idle = self._asked
        identity = trajectory.trajectory_id
        self._send(
            Add(
                number=generation.order,
                tokens=list(generation.tokens),
                max_tokens=generation.bound - generation.length,
                seed=trajectory_key(self._seed, f"{identity}\x00{generation.position}") >> 1,
                sampling=self._greedy if greedy else self._sampling,
            )
        )
        self._held[identity] = self._numbered[generation.order] = generation

    def step(self) -> Sequence[Trajectory]:
        """The next step of all running trajectories. Returns those that finished, and forgets them."""
        self._check()
        if self._held and not self._finished:
            answers = self._idle + 1
            while self._asked < answers + STEPS_AHEAD:
                self._send(DecodeStep())
                self._asked += 1
            for message in self._messages():
                answers -= isinstance(message, Stepped) and not message.rebuilding
                if answers == 0:
                    break
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories, keeping all tokens that vLLM has for them. Unknown ids are skipped."""
        wanted = self._numbers(trajectory_ids)
        if wanted:
            self._send(Remove(numbers=wanted, answer=True))
            for message in self._messages():
                if isinstance(message, Removed):
                    break
        return self._forget(trajectory_ids)

    def abort(self, trajectory_ids: Sequence[str]) -> Sequence[Trajectory]:
        """Remove trajectories whose tokens are no longer needed. Unknown ids are skipped."""
        wanted = self._numbers(trajectory_ids)
        if wanted:
            self._send(Remove(numbers=wanted, answer=False))
        return self._forget(trajectory_ids)

    def trajectories(self) -> Mapping[str, Trajectory]:
        """All trajectories held, running or waiting, with their tokens so far."""
        ended = {t.trajectory_id: t.finished(None) for t in self._finished}
        return ended | {name: generation.trajectory() for name, generation in self._held.items()}

    def _numbers(self, trajectory_ids: Sequence[str]) -> tuple[int, ...]:
        self._check()
        return tuple(self._held[name].order for name in trajectory_ids if name in self._held)

    def _forget(self, trajectory_ids: Sequence[str]) -> list[Trajectory]:
        gone = [self._held[name] for name in dict.fromkeys(trajectory_ids) if name in self._held]
        for generation in gone:
            self._drop(generation)
        return [generation.trajectory() for generation in gone]

    def _drop(self, generation: Generation) -> None:
        del self._held[generation.trajectory_id], self._numbered[generation.order]
        self._running.discard(generation.order)

    # ------------------------------------------------------------------ messages from vLLM

    def _messages(self) -> Iterator[Any]:
        """Messages from the host; a `Stepped` is recorded before it is yielded."""
        while True:
            try:
                message = self._host.receive()
            except EngineError as error:
                raise self._broken(str(error)) from error
            if isinstance(message, Stepped):
                self._take(message)
            yield message

    def _take(self, stepped: Stepped) -> None:
        if not stepped.rebuilding:
            self._asked -= 1
            self._idle -= self._idle > 0
        # An aborted trajectory may have gained tokens in the step that was under way.
        gains = [gain for gain in stepped.gains if gain.number in self._numbered]
        if gains and not stepped.rebuilding:
            self._decode_steps += 1
            self._decode_s += stepped.seconds
            self._running_steps += len(gains)
            self._kv_token_steps += sum(self._numbered[gain.number].length for gain in gains)
            self._prefilled += sum(
                self._numbered[gain.number].length - gain.cached
                for gain in gains
                if gain.number not in self._running
            )
        for gain in gains:
            self._extend(self._numbered[gain.number], gain, stepped.version)
        lost = self._running.intersection(stepped.preempted)
        self._running -= lost
        self._preemptions += 0 if stepped.rebuilding else len(lost)

    def _extend(self, generation: Generation, gain: Gain, version: int) -> None:
        for token, log_prob in zip(gain.tokens, gain.log_probs, strict=True):
            if not math.isfinite(log_prob):
                raise self._broken("the model returned log-probs that are not finite")
            generation.append(token, log_prob, version)
        self._generated += len(gain.tokens)
        self._running.add(generation.order)
        if gain.ended:
            reason = FinishReason.STOP if gain.ended == "stop" else FinishReason.LENGTH
            self._drop(generation)
            self._finished.append(generation.trajectory(reason))

    # ------------------------------------------------------------------ weights

    def load_weights(self, tensors: Mapping[str, NDArray[Any]], version: int, on_pull: OnPull) -> None:
        """Swap weights in place; running trajectories stay, their KV rebuilt or kept according to `on_pull`.

        With a handle, the workers lease `version` themselves, and `tensors` only serves to check names and
        shapes. Raises EngineError, keeping the old weights and version, if the tensors do not match this
        model or the workers cannot get them. Any other failure breaks the engine.
        """
        self._check()
        check_shapes(tensors, self._stored, tied=self._tied)
        with self._placed(tensors, version) as at:
            self._send(WeightUpdate(weights=at, on_pull=on_pull))
            for message in self._messages():
                if isinstance(message, Refused):
                    raise EngineError(message.reason)
                if isinstance(message, Updated):
                    break
        self._version = version

    @contextlib.contextmanager
    def _placed(self, tensors: Mapping[str, NDArray[Any]], version: int) -> Iterator[WeightsAt]:
        if self._handle is not None:
            yield WeightsAt(version=version, handle=self._handle, file=None)
            return
        from safetensors.numpy import save_file

        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="staleflow-vllm-", dir=memory) as folder:
            file = str(Path(folder) / "weights.safetensors")
            save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
            yield WeightsAt(version=version, handle=None, file=file)

    # ------------------------------------------------------------------ counts and closing

    def load(self) -> EngineLoad:
        """Counts for the snapshot. A trajectory in the middle of its prefill counts as waiting.

        `kv_capacity` is what fits whatever the lengths. With shared prefixes, or blocks that happen to be
        full, more tokens may run; `kv_tokens` is capped at the capacity. A broken engine raises EngineError:
        reporting empty counts, it would look idle and refuse trajectories forever.
        """
        self._check()
        running = len(self._running)
        tokens = sum(self._numbered[number].length for number in self._running)
        return EngineLoad(
            running=running,
            waiting=len(self._held) - running + len(self._finished),
            kv_tokens=min(tokens, self._capacity),
            kv_capacity=self._capacity,
            preemptions=self._preemptions,
            generated_tokens=self._generated,
            decode_steps=self._decode_steps,
            running_steps=self._running_steps,
            kv_token_steps=self._kv_token_steps,
            prefilled_tokens=self._prefilled,
            decode_seconds=self._decode_s,
        )

    def close(self) -> None:
        """End vLLM and all its processes; may be called twice. Any later call raises EngineError."""
        self._failure = self._failure or "the engine is closed"
        self._held.clear()
        self._numbered.clear()
        self._running.clear()
        self._finished.clear()
        self._host.close()

    def _send(self, message: Any) -> None:
        try:
            self._host.send(message)
        except EngineError as error:
            raise self._broken(str(error)) from error

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _broken(self, reason: str) -> EngineError:
        """Mark the engine as failed, kill vLLM, and return the error to raise."""
        self._failure = reason
        self._host.kill()
        return EngineError(reason)


def _travels(handle: Handle | None) -> bool:
    try:
        pickle.dumps(handle)
    except (TransportError, pickle.PicklingError, TypeError, AttributeError):
        return False
    return True
