"""The bottleneck of a run: which side was slow, the figures that show it, and what to change.

Rules, on measured values alone. W: share of time that the trainer waited; I: share of instance time that was
idle while the trainer worked. A share below WORTH_NAMING counts as none.

1. Both below it: balanced.
2. Neither below it, and neither TWICE the other: taking turns. The two sides overlap for 1 - W - I.
3. I larger: trainer-bound.
4. W larger: by what the trainer waited for longest: busy instances (rollout-bound), the last few responses
   (latency-bound), verifiers (reward-bound), loading of weights (pull-bound; also when instances spent more
   time on pulls than on decoding), nothing running (coordination-bound), or environments
   (environment-bound).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleflow.reporting.load import RunData, setting
from staleflow.reporting.utilization import TimeShares

WORTH_NAMING = 0.15
"""A smaller share of idle time is not worth naming a bottleneck for."""
TWICE = 2.0
"""If neither side is idle this many times as long as the other, neither is the slow one."""

_KINDS = {
    "rollout": "rollout-bound",
    "longest": "latency-bound",
    "reward": "reward-bound",
    "pull": "pull-bound",
    "routing": "coordination-bound",
    "environment": "environment-bound",
}
_MEANWHILE = {
    "rollout": "while the instances were busy",
    "longest": "while only the longest responses were still running",
    "reward": "while more trajectories were being scored than running",
    "pull": "while instances loaded weights",
    "routing": "while nothing was running, being scored or loading",
    "environment": "while environments were answering",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What each side of a run had, from its config; None if the config does not say."""

    policy: str | None
    bound: int | None
    instances: int | None
    instance_threads: int | None
    trainer_threads: int | None
    reward_workers: int | None
    one_machine: bool
    """All processes shared the CPU cores of one machine."""
    cores: int | None
    unit: str = "CPU threads"
    """Unit of the resources of instances and trainer."""
    shared: bool = False
    """Both sides use all GPUs in turn."""
    virtual: bool = False
    """An inline run: its times are those of a virtual clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The slow side of a run."""

    kind: str
    """`rollout-bound`, ..., `taking turns`, `balanced` or `unknown`."""
    figures: str
    """The shares of time that show it."""
    advice: str
    """What to change; empty if nothing."""
    split: tuple[float, float] | None = None
    """Suggested resources of rollout and training, in the run's unit."""
    split_now: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """Kind, figures and advice in one line."""
        return f"{self.kind}: {self.figures}" + (f". {self.advice}" if self.advice else "")


def resources(run: RunData) -> Resources:
    """Read them from the run's config or, of a simulated run, from its simulation.json."""
    if run.simulation:
        return _simulated_resources(run)
    virtual = setting(run.config, "cluster", "runtime") == "inline"
    one_machine = (
        not virtual and "cluster" in run.config and setting(run.config, "cluster", "address") is None
    )
    cores = run.summary.get("run/cpu_cores")
    return Resources(
        policy=setting(run.config, "coordination", "policy"),
        bound=run.bound,
        instances=_whole(run.config, "rollout", "instances"),
        instance_threads=_whole(run.config, "rollout", "threads"),
        trainer_threads=_whole(run.config, "training", "threads"),
        reward_workers=_whole(run.config, "reward", "workers"),
        one_machine=one_machine,
        cores=int(cores) if isinstance(cores, int) else None,
        virtual=virtual,
    )


def _simulated_resources(run: RunData) -> Resources:
    gpus = run.simulation.get("gpus")
    gpus = gpus if isinstance(gpus, Mapping) else {}
    return Resources(
        policy=setting(run.config, "coordination", "policy"),
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


def bottleneck(shares: TimeShares, given: Resources) -> Bottleneck:
    """Apply the rules of the module."""
    waiting, idle, during = shares.trainer_waiting, shares.idle, shares.idle_while_training
    if waiting is None or idle is None:
        return Bottleneck(
            kind="unknown",
            figures="the run did not record the waiting of both the trainer and the instances",
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
    return _trainer_waited(shares, waiting, idle, given)


def _taking_turns(waiting: float, during: float, given: Resources) -> Bottleneck:
    figures = (
        f"the trainer waited {waiting:.0%} of the time, and the instances idled {during:.0%} while the "
        f"trainer worked, so both worked at the same time for {max(0.0, 1 - waiting - during):.0%}"
    )
    if given.policy in ("sync", "one_step"):
        advice = f"Policy {given.policy} alternates them; another policy lets them overlap"
    elif given.bound == 0:
        advice = "staleness.bound: 0 alternates them; 1 or more lets them overlap"
    else:
        advice = "A larger staleness.bound lets them overlap more; another split of resources does not"
    return Bottleneck(kind="taking turns", figures=figures, advice=advice)


def _trainer_bound(
    shares: TimeShares, waiting: float, idle: float, during: float, given: Resources
) -> Bottleneck:
    figures = (
        f"the instances idled {idle:.0%} of the time, {during:.0%} while the trainer worked; "
        f"the trainer waited {waiting:.0%}"
    )
    split, now, advice = _split(waiting, idle, given, "Move resources from rollout to training")
    return Bottleneck(kind="trainer-bound", figures=figures, advice=advice, split=split, split_now=now)


def _trainer_waited(shares: TimeShares, waiting: float, idle: float, given: Resources) -> Bottleneck:
    """Find what the trainer waited for."""
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
                figures += f", {meanwhile:.0%} while the trainer waited, so the work was spread unevenly"
        case "longest":
            advice = (
                "More instances will not help: a larger staleness.bound gives them other work meanwhile; "
                "redundancy and coordination.stragglers shorten the tail, but favour short responses"
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
            advice = (
                "Lower coordination.interval_ms, and run `staleflow explain` to see what a step waited for"
            )
        case _:
            advice = "Make the environment faster"
    return Bottleneck(kind=_KINDS[cause], figures=figures, advice=advice, split=split, split_now=now)


def _split(
    waiting: float, idle: float, given: Resources, move: str
) -> tuple[tuple[float, float] | None, tuple[float, float] | None, str]:
    """Suggest resources in the ratio in which they were busy: then neither side would wait."""
    if given.shared:
        return None, None, "Both sides use all GPUs in turn: another policy lets them overlap"
    if given.instances is None or given.trainer_threads is None:
        return None, None, move
    rollout, training = given.instances * (given.instance_threads or 1), given.trainer_threads
    need = (rollout * (1 - idle), training * (1 - waiting))
    if min(need) <= 0:
        return None, None, move
    advice = (
        f"{move}: from {_ratio(rollout, training)} to about {_ratio(*need)} "
        f"({given.unit}, if both sides scale with them)"
    )
    if given.one_machine:
        cores = f"{given.cores} cores" if given.cores else "cores"
        advice += (
            f". Their {rollout + training} threads share this machine's {cores} and slow each other down: "
            "take the ratio as a direction"
        )
    return need, (float(rollout), float(training)), advice


def _more_workers(shares: TimeShares, given: Resources) -> str:
    workers, verifying = given.reward_workers, shares.verifying
    waited = min(0.9, shares.waiting_for.get("reward", 0.0))
    if workers is None or verifying is None:
        return "Raise reward.workers, or make the verifier faster"
    needed = max(workers + 1, math.ceil(verifying / (1 - waited)))
    return (
        f"Raise reward.workers from {workers} to about {needed}, or make the verifier faster: "
        f"verifiers were busy for {verifying:.1f} s of each second"
    )


def _ratio(rollout: float, training: float) -> str:
    """`2 : 1`, with the smaller side as 1."""
    small = min(rollout, training)
    return " : ".join(f"{side / small:.1f}".removesuffix(".0") for side in (rollout, training))


def _whole(config: Mapping[str, Any], section: str, key: str) -> int | None:
    value = setting(config, section, key)
    return value if isinstance(value, int) else None
