"""Measures an engine: seconds of decode steps, prefills and pulls under different loads.

Invariants: every load of the plan is measured and appears in the result; the loads are measured `repeats`
times, alternating forwards and backwards, so that a machine that gets slower or faster favours none; the
loads held out from the fit are fixed before any measurement.

The time of a step is that of the call, or what an engine that decodes in the background reports. The time of
a load is that of its fastest step over all repeats, since other work on the machine only adds time. `usual_s`
(the median step) shows how much it added: if the two differ a lot, the machine was busy, and a run on it will
be slowed down likewise.

Half of the loads have trajectories of one length, half have lengths spread around the same mean. An engine
that pads to the longest is slower on the latter, which the cost model cannot represent because it knows only
the sum. Runs have spread lengths, so these count in the fit and in its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from numpy.typing import NDArray

from staleflow.coordination.cost_model import PrefillPoint, StepPoint
from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.errors import UserError
from staleflow.rollout.engine import Engine

STEPS = 6
"""Timed decode steps of one load in each repeat."""
COUNTS = 9
"""Approximate number of running counts, in equal ratios from 1 to the maximum."""
CONTEXTS = 6
"""Approximate number of context lengths for each count, likewise. Even: each is either short or long."""
SHORTEST = 8
"""Tokens of the shortest context."""
SPREAD = 0.75
"""Spread lengths go from 1 - SPREAD to 1 + SPREAD times the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLoad:
    """Trajectories decoded together."""

    lengths: tuple[int, ...]
    """Tokens of each trajectory before the first step."""
    spread: bool
    held_out: bool
    """Excluded from the fit and used to judge it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """Measured times of one load."""

    step: StepPoint
    usual_s: float
    """Seconds of the median step; `step` is the fastest."""
    prefill: PrefillPoint | None
    """None if its time was too short to measure."""
    spread: bool
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one engine."""

    loads: tuple[MeasuredLoad, ...]
    pull_s: float
    """Fastest `load_weights` with nothing running, in seconds."""

    @property
    def disturbance(self) -> float:
        """How much slower the usual step is than the fastest, as a share: near 0 if nothing else runs."""
        return mean(load.usual_s / load.step.seconds - 1 for load in self.loads)

    def steps(self, *, held_out: bool) -> list[StepPoint]:
        """Decode steps of the loads that are held out, or of the others."""
        return [load.step for load in self.loads if load.held_out is held_out]

    def prefills(self, *, held_out: bool) -> list[PrefillPoint]:
        """Prefills of the loads that are held out, or of the others."""
        chosen = [load.prefill for load in self.loads if load.held_out is held_out]
        return [prefill for prefill in chosen if prefill is not None]


def plan_loads(*, max_running: int, kv_capacity: int, max_model_len: int) -> tuple[ProfileLoad, ...]:
    """Loads over the running counts and contexts that the engine can hold, a third of them held out.

    Arguments in trajectories, tokens, tokens. Raises UserError if the engine is too small to vary the load.
    """
    room = STEPS + 3  # each gains one token in the prefill step, in each timed step and in one before them
    longest = min(max_model_len, kv_capacity) - room
    if longest < 2 * SHORTEST or max_running < 2 or kv_capacity < 4 * (SHORTEST + room):
        raise UserError(
            f"an engine with {max_running} running trajectories, {kv_capacity} cached tokens and contexts of "
            f"{max_model_len} tokens is too small to profile: it needs at least 2, "
            f"{4 * (SHORTEST + room)} and {2 * SHORTEST + room}"
        )
    loads = []
    for i, count in enumerate(_in_equal_ratios(1, max_running, COUNTS)):
        most = min(longest, kv_capacity // count - room)
        if most < SHORTEST:
            break
        for j, context in enumerate(_in_equal_ratios(SHORTEST, most, CONTEXTS)):
            spread = (i + j) % 2 == 1 and count > 1
            lengths = _spread_lengths(count, context, longest) if spread else (context,) * count
            loads.append(ProfileLoad(lengths=lengths, spread=spread, held_out=(2 * i + j) % 3 == 2))
    return tuple(loads)


def _in_equal_ratios(first: int, last: int, count: int) -> list[int]:
    ratio = (last / first) ** (1 / (count - 1))
    return sorted({round(first * ratio**i) for i in range(count)})


def _spread_lengths(count: int, mean: int, longest: int) -> tuple[int, ...]:
    middle = min(mean, longest / (1 + SPREAD))
    shares = [SPREAD * (2 * i / (count - 1) - 1) for i in range(count)]
    return tuple(round(middle * (1 + share)) for share in shares)


def profile(
    engine: Engine,
    loads: Sequence[ProfileLoad],
    *,
    weights: Mapping[str, NDArray[Any]],
    clock: Callable[[], float],
    vocab_size: int,
    repeats: int = 5,
    progress: Callable[[], object] = lambda: None,
) -> Profile:
    """Measure an engine that does not end trajectories by itself within STEPS + 2 tokens.

    `weights` are passed to `load_weights`; `clock` returns seconds; `progress` is called `repeats` times per
    load. Raises UserError if the engine ends trajectories, cannot hold a load, or takes no time.
    """
    pulls = []
    for version in range(repeats + 1):
        began = clock()
        engine.load_weights(weights, version, "keep_kv")
        pulls.append(clock() - began)
    ids = _ids()
    # Warm-up: one-time allocation and compilation are not part of a step's cost.
    _measure(engine, max(loads, key=lambda load: sum(load.lengths)), ids, clock, vocab_size)
    timed: list[list[_Timing]] = [[] for _ in loads]
    for repeat in range(repeats):
        order = range(len(loads))
        for i in order if repeat % 2 == 0 else reversed(order):
            timed[i].append(_measure(engine, loads[i], ids, clock, vocab_size))
            progress()
    measured = [_summed_up(load, times) for load, times in zip(loads, timed, strict=True)]
    return Profile(loads=tuple(measured), pull_s=min(pulls[1:]))


@dataclass(frozen=True, slots=True)
class _Timing:
    """One repeat of one load."""

    first_s: float
    """Seconds of the step in which all join."""
    steps: tuple[StepPoint, ...]
    """The timed steps."""


def _measure(
    engine: Engine, load: ProfileLoad, ids: Iterator[str], clock: Callable[[], float], vocab_size: int
) -> _Timing:
    """Decode the load for some steps, then remove it."""
    held = [_trajectory(next(ids), length, vocab_size) for length in load.lengths]
    for trajectory in held:
        engine.add(trajectory)
    points: list[StepPoint] = []
    before = engine.load()
    for _ in range(STEPS + 1):
        began = clock()
        ended = engine.step()
        seconds = clock() - began
        now = engine.load()
        if now.decode_seconds is not None and before.decode_seconds is not None:
            seconds = now.decode_seconds - before.decode_seconds
        if ended or now.running != len(held):
            raise UserError(
                f"the engine decodes only {now.running} of {len(held)} trajectories with "
                f"{sum(load.lengths)} tokens in all, so it cannot be profiled"
            )
        if seconds <= 0:
            raise UserError("a step of the engine takes no time, so there is nothing to profile")
        kv_tokens = now.kv_token_steps - before.kv_token_steps
        points.append(StepPoint(running=len(held), kv_tokens=kv_tokens, seconds=seconds))
        before = now
    engine.interrupt([trajectory.trajectory_id for trajectory in held])
    return _Timing(points[0].seconds, tuple(points[1:]))


def _summed_up(load: ProfileLoad, times: Sequence[_Timing]) -> MeasuredLoad:
    steps = [step for timing in times for step in timing.steps]
    fastest = min(steps, key=lambda step: step.seconds)
    prefill = min(timing.first_s for timing in times) - fastest.seconds
    return MeasuredLoad(
        step=fastest,
        usual_s=median(step.seconds for step in steps),
        prefill=PrefillPoint(tokens=sum(load.lengths), seconds=prefill) if prefill > 0 else None,
        spread=load.spread,
        held_out=load.held_out,
    )


def _ids() -> Iterator[str]:
    number = 0
    while True:
        yield f"profile-{number}"
        number += 1


def _trajectory(name: str, length: int, vocab_size: int) -> Trajectory:
    """A trajectory with a prompt of `length` tokens and more budget than the measurement decodes."""
    tokens = tuple(i * 7919 % vocab_size for i in range(length))
    return Trajectory(
        trajectory_id=name,
        group_id=name,
        member=0,
        prompt=Prompt(prompt_id=name, tokens=tokens, text="", answer=None),
        max_new_tokens=STEPS + 3,
    )
