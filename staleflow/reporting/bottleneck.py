"""Which side held a run up, the figures that say so, and what to do about it.

Rules, from what was measured alone. W: the trainer's waiting; I: instance time idle while the trainer worked.
Both are shares, and a share below WORTH_NAMING blames nobody.

1. Both below it: balanced.
2. Both from it on, and neither TWICE the other: taking turns. The two sides overlap for 1 - W - I.
3. I larger: trainer-bound.
4. W larger: what the trainer waited for longest decides: the instances at work (rollout-bound), the last few
   responses (latency-bound), verifiers (reward-bound), loading of weights (pull-bound, also when
   instances spent more time on pulls than on decoding), nothing that ran at all (coordination-bound), or
   answers from outside (environment-bound).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.load import RunData
from staleflow.reporting.utilization import Shares

WORTH_NAMING = 0.15
"""A side that stands still for less than this share of the time is no bottleneck worth naming."""
TWICE = 2.0
"""Where one side stands still for less than so many times the other, neither is the slow one."""

_KINDS = {
    "rollout": "rollout-bound",
    "longest": "latency-bound",
    "reward": "reward-bound",
    "pull": "pull-bound",
    "routing": "coordination-bound",
    "environment": "environment-bound",
}
_MEANWHILE = {
    "rollout": "while the instances were at work",
    "longest": "while only the longest responses still ran",
    "reward": "while more trajectories were being scored than ran",
    "pull": "while instances loaded weights",
    "routing": "while nothing ran, was scored or loaded",
    "environment": "while answers from outside were awaited",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the run gave to each side, from its config; None where the config does not say."""

    policy: str | None
    bound: int | None
    instances: int | None
    instance_threads: int | None
    trainer_threads: int | None
    reward_workers: int | None
    one_machine: bool
    """All parts ran on one machine, and shared its CPU cores."""
    cores: int | None
    unit: str = "CPU threads"
    """What instances and trainer are counted in."""
    shared: bool = False
    """Both sides have all machines in turn."""
    virtual: bool = False
    """The run was in one process, in which a step takes as long as its virtual clock says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A verdict."""

    kind: str
    """`rollout-bound`, ..., `taking turns`, `balanced` or `unknown`."""
    figures: str
    """What it rests on."""
    advice: str
    """What to change; empty where nothing needs to be."""
    split: tuple[float, float] | None = None
    """Suggested resources, rollout to training, in the units that the run used."""
    split_now: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.kind}: {self.figures}" + (f". {self.advice}" if self.advice else "")


def setup(run: RunData) -> Setup:
    """Read the run's config, or what a simulated run was reckoned with."""
    if run.simulation:
        return _simulated_setup(run)
    virtual = _at(run.config, "cluster", "runtime") == "inline"
    one_machine = not virtual and "cluster" in run.config and _at(run.config, "cluster", "address") is None
    cores = run.summary.get("run/cpu_cores")
    return Setup(
        policy=_at(run.config, "coordination", "policy"),
        bound=run.bound,
        instances=_whole(run.config, "rollout", "instances"),
        instance_threads=_whole(run.config, "rollout", "threads"),
        trainer_threads=_whole(run.config, "training", "threads"),
        reward_workers=_whole(run.config, "reward", "workers"),
        one_machine=one_machine,
        cores=int(cores) if isinstance(cores, int) else None,
        virtual=virtual,
    )


def _simulated_setup(run: RunData) -> Setup:
    gpus = run.simulation.get("gpus")
    gpus = gpus if isinstance(gpus, Mapping) else {}
    return Setup(
        policy=_at(run.config, "coordination", "policy"),
        bound=run.bound,
        instances=gpus.get("rollout"),
        instance_threads=1,
        trainer_threads=gpus.get("training"),
        reward_workers=None,
        one_machine=False,
        cores=None,
        unit="GPUs",
        shared=gpus.get("shared") is True,
    )


def bottleneck(shares: Shares, given: Setup) -> Bottleneck:
    """Judge by the rules of the module."""
    waiting, idle, during = shares.trainer_waiting, shares.idle, shares.idle_while_training
    if waiting is None or idle is None:
        return Bottleneck(
            kind="unknown",
            figures="the run has no samples of both the trainer's and the instances' waiting",
            advice="",
        )
    during = idle if during is None else during
    if max(waiting, during) < WORTH_NAMING:
        figures = f"the trainer waited {waiting:.0%} of the time and the instances idled {idle:.0%}"
        return Bottleneck(kind="balanced", figures=figures, advice="")
    if min(waiting, during) >= WORTH_NAMING and max(waiting, during) < TWICE * min(waiting, during):
        return _taking_turns(waiting, during, given)
    if during > waiting:
        return _trainer_bound(shares, waiting, idle, during, given)
    return _held_up(shares, waiting, idle, given)


def _taking_turns(waiting: float, during: float, given: Setup) -> Bottleneck:
    figures = (
        f"the trainer waited {waiting:.0%} of the time, and the instances idled {during:.0%} of it while the "
        f"trainer worked, so both were at work together for {max(0.0, 1 - waiting - during):.0%}"
    )
    if given.policy in ("sync", "one_step"):
        advice = f"Policy {given.policy} works like that; another one lets them overlap"
    elif given.bound == 0:
        advice = "staleness.bound: 0 means that; 1 or more lets them overlap"
    else:
        advice = "A larger staleness.bound lets them overlap more; another split of resources would not"
    return Bottleneck(kind="taking turns", figures=figures, advice=advice)


def _trainer_bound(shares: Shares, waiting: float, idle: float, during: float, given: Setup) -> Bottleneck:
    figures = (
        f"the instances idled {idle:.0%} of the time, {during:.0%} while the trainer worked; "
        f"the trainer waited {waiting:.0%}"
    )
    split, now, advice = _split(waiting, idle, given, "Move resources from rollout to training")
    return Bottleneck(kind="trainer-bound", figures=figures, advice=advice, split=split, split_now=now)


def _held_up(shares: Shares, waiting: float, idle: float, given: Setup) -> Bottleneck:
    """The trainer waited; for what?"""
    causes = shares.waiting_for
    cause = max(causes, key=lambda name: causes[name]) if causes else "rollout"
    pulling = shares.pulling or 0.0
    if cause == "rollout" and pulling >= WORTH_NAMING and pulling > (shares.decoding or 0.0):
        cause = "pull"
    figures = f"the trainer waited {waiting:.0%} of the time"
    if causes.get(cause):
        figures += f", {causes[cause]:.0%} {_MEANWHILE[cause]}"
    figures += f"; the instances idled {idle:.0%}"
    split = now = None
    match cause:
        case "rollout":
            split, now, advice = _split(waiting, idle, given, "Move resources from training to rollout")
            meanwhile = idle - (shares.idle_while_training or 0.0)
            if causes and meanwhile >= WORTH_NAMING:
                figures += f", {meanwhile:.0%} while the trainer waited, so work was spread unevenly"
        case "longest":
            advice = (
                "More instances will not help: a larger staleness.bound gives them other work meanwhile; "
                "redundancy and coordination.stragglers cut the tail, at the price of fewer long responses"
            )
        case "reward":
            advice = _more_workers(shares, given)
        case "pull":
            figures += f", and spent {pulling:.0%} on pulls"
            advice = (
                "Pull less often (coordination.synchronization.strategy: selective) or keep the KV cache "
                "(rollout.on_pull: keep_kv)"
            )
        case "routing":
            if shares.coordination is not None:
                figures += f"; coordination took {shares.coordination:.1%}"
            advice = "Lower coordination.interval_ms, and see `staleflow explain` for what a step waited for"
        case _:
            advice = "The environment is the slow side"
    return Bottleneck(kind=_KINDS[cause], figures=figures, advice=advice, split=split, split_now=now)


def _split(
    waiting: float, idle: float, given: Setup, move: str
) -> tuple[tuple[float, float] | None, tuple[float, float] | None, str]:
    """Resources in the ratio in which they were at work: were both sides as fast as that, neither waited."""
    if given.shared:
        return None, None, "Both sides have all GPUs in turn: another policy lets them overlap"
    if given.instances is None or given.trainer_threads is None:
        return None, None, move
    rollout, training = given.instances * (given.instance_threads or 1), given.trainer_threads
    need = (rollout * (1 - idle), training * (1 - waiting))
    if min(need) <= 0:
        return None, None, move
    advice = (
        f"{move}: about {_ratio(*need)}, where it is {_ratio(rollout, training)} now "
        f"({given.unit}, if both sides gain by what they are given)"
    )
    if given.one_machine:
        cores = f"{given.cores} cores" if given.cores else "cores"
        advice += (
            f". Their {rollout + training} threads share this machine's {cores}, where each slows the others "
            "down: take the ratio as a direction"
        )
    return need, (float(rollout), float(training)), advice


def _more_workers(shares: Shares, given: Setup) -> str:
    workers, verifying = given.reward_workers, shares.verifying
    waited = min(0.9, shares.waiting_for.get("reward", 0.0))
    if workers is None or verifying is None:
        return "Give reward.workers more, or make the verifier faster"
    needed = max(workers + 1, math.ceil(verifying / (1 - waited)))
    return (
        f"Raise reward.workers from {workers} to about {needed}, or make the verifier faster: "
        f"it was at work {verifying:.1f} s of each second"
    )


def _ratio(rollout: float, training: float) -> str:
    """`2 : 1`, the smaller side as 1."""
    small = min(rollout, training)
    return " : ".join(f"{side / small:.1f}".removesuffix(".0") for side in (rollout, training))


def _at(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None


def _whole(config: Mapping[str, Any], section: str, key: str) -> int | None:
    value = _at(config, section, key)
    return value if isinstance(value, int) else None
