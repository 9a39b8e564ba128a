"""`Control` with its policy and costs, and the trajectory server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from staleflow.config.schema import Config
from staleflow.coordination.batches import BatchSettings
from staleflow.coordination.control import Control, Patience
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import START_VALUES
from staleflow.coordination.estimates import OnlineCosts
from staleflow.coordination.migration import MigrationSettings
from staleflow.coordination.policies import PolicySettings, build_coordinator, effective_bound
from staleflow.coordination.stragglers import StragglerRule
from staleflow.data.schedule import PromptSchedule
from staleflow.data.sources import PromptSource
from staleflow.data.trajectory import Prompt
from staleflow.protocol.buffer import StalenessBuffer
from staleflow.protocol.records import Start
from staleflow.registry import make_named
from staleflow.runtime.start import StartPoint
from staleflow.servers.trajectory_server import TrajectoryServer
from staleflow.storage.cost_file import load_cost_model
from staleflow.training.filtering import is_uninformative

STRATEGY_METHODS = {
    "routing": ("route",),
    "synchronization": ("synchronize", "after_routing"),
    "migration": ("migrate",),
}
"""The methods of `RoutingStrategy`, `SynchronizationStrategy` and `MigrationStrategy`."""


def build_control(
    config: Config,
    start: StartPoint,
    *,
    costs: OnlineCosts | None = None,
    patience: Patience | None = None,
    filtered: bool = True,
) -> Control:
    """Buffer, coordinator and lifecycle of this attempt.

    A simulation gives `costs` and `patience` of its own; `filtered` false: no group is, whatever the config
    says.
    """
    coordination, data = config.coordination, config.data
    return Control(
        buffer=StalenessBuffer(
            bound=kept_bound(config),
            batch_size=data.batch_size,
            spare_limit=config.redundancy.groups,
            next_buffer=start.step,
        ),
        coordinator=build_policy(config),
        batches=BatchSettings(
            steps=config.run.steps,
            group_size=data.group_size,
            last_batch=data.last_batch,
            max_filtered_batches=data.max_filtered_batches,
        ),
        patience=patience
        or Patience(stall_after_s=config.rollout.lost_after_s, max_retries=config.rollout.max_retries),
        stragglers=StragglerRule(
            action=coordination.stragglers.action, at_most=coordination.stragglers.at_most
        ),
        expected_response=max(1, config.rollout.max_new_tokens // 4),
        group_filter=is_uninformative if filtered and config.training.dynamic_sampling else None,
        costs=costs or build_costs(config),
        attempt=start.attempt,
        next_seq=start.next_seq,
    )


def build_costs(config: Config) -> OnlineCosts:
    """The cost model that the run starts with. Raises ConfigError for a file that holds none."""
    coordination = config.coordination
    named = coordination.cost_model
    start = load_cost_model(Path(named).expanduser()) if named is not None else START_VALUES
    return OnlineCosts(start, refine=coordination.refine_costs)


def kept_bound(config: Config) -> int:
    """The staleness bound that the policy keeps: that of the config, or less."""
    return effective_bound(config.coordination.policy, config.staleness.bound)


def build_policy(config: Config) -> Coordinator:
    """The coordinator of the config's policy, with the strategies that the config puts in their place.

    Raises ConfigError when one of the user's own cannot be made.
    """
    coordination, rollout = config.coordination, config.rollout
    routing, migration = coordination.routing, coordination.migration
    return build_coordinator(
        coordination.policy,
        PolicySettings(
            **{part: _strategy(config, part) for part in STRATEGY_METHODS},
            mu=routing.mu,
            kv_headroom=routing.kv_headroom,
            max_per_instance=routing.max_per_instance or rollout.max_running,
            moves=MigrationSettings(
                phi_wait=migration.phi_wait,
                psi_throughput=migration.psi_throughput,
                rest_s=migration.rest_s,
                kv_headroom=routing.kv_headroom,
                longest_response=rollout.max_new_tokens,
            ),
            recompute=rollout.on_pull == "recompute",
        ),
    )


def _strategy(config: Config, part: str) -> Any:
    """A strategy's name, or one of the user's own."""
    section = getattr(config.coordination, part)
    if section.strategy is None or "." not in section.strategy:
        return section.strategy
    key = f"coordination.{part}.strategy"
    return make_named(key, section.strategy, {}, section.options, STRATEGY_METHODS[part])


def build_trajectory_server(config: Config, source: PromptSource, start: StartPoint) -> TrajectoryServer:
    """Payload storage, fed from the prompts that this attempt has not used yet."""
    data = config.data

    def prompts(epochs: int | None, used: Mapping[int, set[int]]) -> Iterator[tuple[int, int, Prompt]]:
        schedule = PromptSchedule(
            len(source), epochs=epochs, seed=config.run.seed, shuffle=data.shuffle, used=used
        )
        return ((epoch, index, source.prompt(index)) for epoch, index in schedule)

    everything = set(range(len(source)))
    past = {epoch: everything for epoch in range(data.epochs or 0)}
    return TrajectoryServer(
        prompts=prompts(data.epochs, start.used),
        padding=prompts(None, {**past, **{e: u for e, u in start.used.items() if e not in past}}),
        members=data.group_size + config.redundancy.members,
        max_new_tokens=config.rollout.max_new_tokens,
        attempt=start.group_attempt,
    )


def opening_record(config: Config) -> Start:
    """The first record of the ledger."""
    return Start(
        bound=kept_bound(config),
        batch_size=config.data.batch_size,
        group_size=config.data.group_size,
        last_batch=config.data.last_batch,
        spare_limit=config.redundancy.groups,
    )
