"""Builds a simulated cluster from the config's section `simulation`; only this module reads that section.

Invariants: every key outside the section means the same as in a real run; a cluster that cannot work (weights
that do not fit, a KV cache smaller than one trajectory, instances that all die) is refused with the
arithmetic, before anything is simulated; policy `sync` uses all GPUs for both phases and pays
`latencies.switch_s` for each change of phase.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from staleflow.config.schema import Config
from staleflow.config.schema_simulation import SimulatedLengths
from staleflow.coordination.cost_model import CostModel
from staleflow.errors import ConfigError, UserError
from staleflow.simulation.gpus import find_gpu
from staleflow.simulation.models import find_model
from staleflow.simulation.response_lengths import Lengths, bimodal, fixed, lognormal, replay
from staleflow.simulation.roofline import Roofline, Shares
from staleflow.simulation.settings import (
    ClusterSettings,
    Outage,
    Slowdown,
    TrainerCosts,
    always_right,
)
from staleflow.storage.cost_file import load_cost_model
from staleflow.storage.journal import read_journal

SAMPLED_PROMPTS = 256
"""Prompts from whose lengths the mean context is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Mean contexts of a workload, in tokens; estimated from the response lengths of the first prompts."""

    held: float
    """KV of a running trajectory: prompt + E[r^2] / (2 E[r]) for response length r, since a response of r
    tokens runs for r steps and has r / 2 tokens on average."""
    attended: float
    """Positions that a trained token attends to: E[l^2] / (2 E[l]), l = length of prompt and response."""


def cluster_settings(
    config: Config, *, lengths: Lengths | None = None, context: Context | None = None
) -> ClusterSettings:
    """The simulated cluster of a config. Raises UserError for one that cannot work.

    `lengths`, `context`: those of the config, if already known.
    """
    simulation, rollout, data = config.simulation, config.rollout, config.data
    lengths = lengths or read_lengths(config)
    if simulation.costs is not None:
        costs = load_cost_model(Path(simulation.costs).expanduser())
        instances, kv_capacity = rollout.instances, rollout.kv_capacity_tokens
        trainer = TrainerCosts()
    else:
        costs, instances, kv_capacity, trainer = _from_hardware(
            config, context or find_context(config, lengths)
        )
    latencies = simulation.latencies
    settings = ClusterSettings(
        instances=instances,
        kv_capacity=kv_capacity,
        max_running=rollout.max_running,
        costs=costs,
        trainer=_overridden(config, trainer),
        group_size=data.group_size,
        lengths=lengths,
        prompt_length=simulation.prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        surplus=config.redundancy.members,
        on_pull=rollout.on_pull,
        interval_s=config.coordination.interval_ms / 1000,
        command_s=latencies.command_s,
        report_s=latencies.report_s,
        progress_interval_s=latencies.progress_interval_s,
        reward_s=latencies.reward_s,
        reward_workers=latencies.reward_workers,
        reward=always_right if simulation.solved is None else _rewards(simulation.solved, config.run.seed),
        prompts=_prompts(config),
        outages=tuple(Outage(at=o.at, instance=o.instance, down_s=o.down_s) for o in simulation.outages),
        slowdowns=tuple(
            Slowdown(at=s.at, instance=s.instance, factor=s.factor) for s in simulation.slowdowns
        ),
    )
    if {outage.instance for outage in settings.outages if outage.down_s is None} == set(range(instances)):
        raise UserError(
            f"simulation.outages ends all {instances} instances for good, so the run cannot continue: give "
            "one of them a down_s"
        )
    return settings


def find_roofline(config: Config) -> Roofline:
    """Model, GPU and shares of a config. Raises ConfigError for an unknown model."""
    shares = Shares(**config.simulation.efficiency.model_dump())
    return Roofline(
        model=find_model(config.simulation.model), gpu=find_gpu(config.simulation.gpu), shares=shares
    )


def find_context(config: Config, lengths: Lengths) -> Context:
    """Mean contexts of the workload of a config."""
    prompt, most = config.simulation.prompt_tokens, config.rollout.max_new_tokens
    drawn: list[int] = []
    for number in range(SAMPLED_PROMPTS):
        name = f"e0-p{number}"
        members = [f"{name}-a0-m{m}" for m in range(config.data.group_size)]
        drawn += [max(1, min(most, tokens)) for tokens in lengths(name, members)]
    whole = [prompt + tokens for tokens in drawn]
    return Context(held=prompt + _half_biased(drawn), attended=_half_biased(whole))


def _half_biased(lengths: Sequence[int]) -> float:
    return sum(tokens * tokens for tokens in lengths) / sum(lengths) / 2


def _from_hardware(config: Config, context: Context) -> tuple[CostModel, int, int, TrainerCosts]:
    """Costs, number and KV capacity of the instances; costs of the trainer."""
    simulation, roofline = config.simulation, find_roofline(config)
    parallel, colocated = simulation.tensor_parallel, config.coordination.policy == "sync"
    rollout_gpus, training_gpus = simulation.rollout_gpus, simulation.training_gpus
    if colocated:
        rollout_gpus = training_gpus = rollout_gpus + training_gpus
    capacity = check_capacity(config, roofline, parallel)
    running = max(1, min(config.rollout.max_running, int(capacity / (context.held + 1))))
    latencies, training = simulation.latencies, simulation.training
    costs = roofline.costs(parallel, running=running, attended=context.held / 2, pull_s=latencies.pull_s)
    trainer = roofline.trainer_costs(
        training_gpus,
        attended=context.attended,
        updates=config.training.minibatches,
        logprob_passes=training.logprob_passes,
        overhead_s=training.overhead_s,
        push_s=latencies.push_s,
    )
    if colocated:
        trainer = replace(
            trainer,
            fixed_s=trainer.fixed_s + latencies.switch_s,
            push_s=trainer.push_s + latencies.switch_s,
        )
    return costs, rollout_gpus // parallel, capacity, trainer


def check_capacity(config: Config, roofline: Roofline, parallel: int) -> int:
    """KV capacity of an instance of `parallel` GPUs. Raises UserError if one trajectory does not fit."""
    capacity = roofline.kv_capacity(parallel)
    prompt, response = config.simulation.prompt_tokens, config.rollout.max_new_tokens
    needed = prompt + response + 1
    if capacity < needed:
        fits = "do not fit" if capacity <= 0 else "leave too little"
        enough = [t for t in roofline.parallels() if roofline.kv_capacity(t) >= needed]
        raise UserError(
            f"the weights {fits}: {roofline.memory_sum(parallel)}, and one whole trajectory takes {prompt:,} "
            f"(simulation.prompt_tokens) + {response:,} (rollout.max_new_tokens) + 1 = {needed:,}: "
            + (
                f"simulation.tensor_parallel must be at least {enough[0]}"
                if enough
                else "no number of GPUs of one node is enough"
            )
        )
    return capacity


def _overridden(config: Config, trainer: TrainerCosts) -> TrainerCosts:
    """`trainer` with the seconds that the config sets."""
    stated = config.simulation.training
    return TrainerCosts(
        fixed_s=trainer.fixed_s if stated.fixed_s is None else stated.fixed_s,
        token_s=trainer.token_s if stated.token_s is None else stated.token_s,
        push_s=trainer.push_s if stated.push_s is None else stated.push_s,
    )


def _prompts(config: Config) -> int | None:
    """Number of prompts in all epochs; None: unlimited."""
    if config.data.epochs is None:
        return None
    if config.data.size is None:
        raise ConfigError(
            "data.epochs ends the run when the prompts are used up, but a simulation reads no prompts: set "
            "data.size to their number, or leave data.epochs out"
        )
    return config.data.size * config.data.epochs


# ---------------------------------------------------------------------- lengths and rewards


def read_lengths(config: Config) -> Lengths:
    """Response lengths of a config. Raises UserError if they cannot be read from the recorded run."""
    lengths, most, seed = config.simulation.lengths, config.rollout.max_new_tokens, config.run.seed
    median = lengths.median or most / 4
    match lengths.kind:
        case "fixed":
            return fixed(max(1, min(most, round(median))))
        case "bimodal":
            return bimodal(
                short=lengths.short,
                long=lengths.long,
                long_share=lengths.long_share,
                sigma=lengths.sigma,
                most=most,
                seed=seed,
            )
        case "replay":
            return replay(recorded_lengths(_recorded(lengths)), seed=seed)
        case _:
            return lognormal(
                median=median,
                sigma=lengths.sigma,
                most=most,
                correlation=lengths.correlation,
                truncated=lengths.truncated,
                seed=seed,
            )


def _recorded(lengths: SimulatedLengths) -> Path:
    if lengths.path is None:
        raise ConfigError("simulation.lengths.path: replay needs the folder of a run with a journal")
    return Path(lengths.path).expanduser()


def recorded_lengths(folder: Path) -> list[list[int]]:
    """Response tokens of all finished trajectories of a run, by group, from its journal.

    Raises RunFolderError or UserError if the folder contains none.
    """
    groups: dict[str, list[int]] = {}
    path = folder / "journal.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} has no journal.jsonl: replay needs the folder of a run that wrote one")
    for line in read_journal(path):
        if line["k"] == "done":
            tokens = sum(count for version, count in line.get("runs", ()) if version >= 0)
            if tokens > 0:
                groups.setdefault(line["id"].rpartition("-m")[0], []).append(tokens)
    if not groups:
        raise UserError(f"{path} records no finished trajectory, so there are no lengths to replay")
    return list(groups.values())


def _rewards(solved: float, seed: int) -> Callable[[str], float]:
    """Reward 1 with probability `solved`, as a function of (seed, trajectory id)."""

    def reward(trajectory_id: str) -> float:
        digest = hashlib.blake2b(f"{seed}\x00reward\x00{trajectory_id}".encode(), digest_size=8).digest()
        return float(int.from_bytes(digest, "little") < solved * 2.0**64)

    return reward
