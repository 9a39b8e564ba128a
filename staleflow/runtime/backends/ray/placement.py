"""Placement of the parts on a Ray cluster: one group, with a bundle for each actor that needs resources.

Invariants:

- an actor's bundle lies on one node, so all GPUs of a rollout instance are on one node;
- a request that the cluster can never satisfy is refused, with the sums, before the run creates anything;
  for resources in use by others the run waits, up to a limit;
- a bundle reserves resources, and its actor requests only its GPUs from Ray, so the two processes of the
  servers share one bundle;
- a part that needs no resources has no bundle and runs anywhere. On a local cluster without GPUs this holds
  for every part, and there is no placement group.

::

    [servers] [reward] [evaluation] [training 0] [training 1] .. [rollout 0] [rollout 1] ..
     loop, TS,  verifiers   engines     rank 0        rank 1          i0          i1
     directory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staleflow.config.schema import Config
from staleflow.config.schema_cluster import PartName
from staleflow.errors import ConfigError, RunFailed

Resources = Mapping[str, float]
"""Amount by Ray's name of the resource: CPU, GPU, or a custom one."""
ROUNDING = 1e-6
"""Fractions of a GPU that make up a whole one may add up to slightly more; Ray counts in steps of 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Resources of one actor of a part, and the number of such actors."""

    part: PartName
    actors: int
    resources: Resources
    """Without zero amounts; empty: none needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Maps each actor to its bundle. Picklable."""

    group: Any = None
    """Ray's PlacementGroup; None: no part needs resources."""
    bundles: Mapping[tuple[PartName, int], int] = field(default_factory=dict)
    """Bundle number by part and index."""
    shares: Mapping[PartName, Resources] = field(default_factory=dict)
    """Resources of one actor, by part."""

    def options(self, part: PartName, index: int = 0) -> dict[str, Any]:
        """Options of `ray.remote` for actor number `index` of `part`.

        Every process of the servers uses index 0. Raises ValueError for an index without a bundle.
        """
        options: dict[str, Any] = {"num_cpus": 0}
        wanted = self.shares.get(part, {})
        if gpus := wanted.get("GPU"):
            options["num_gpus"] = gpus
        if not wanted or self.group is None:
            return options
        if (part, index) not in self.bundles:
            raise ValueError(f"{part} has no bundle number {index}")
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles[part, index],
            placement_group_capture_child_tasks=False,
        )
        return options

    @property
    def shares_gpus(self) -> bool:
        """Whether several actors may share one GPU."""
        return any(0 < wanted.get("GPU", 0.0) < 1 for wanted in self.shares.values())

    def nodes(self) -> set[str] | None:
        """Ids of the nodes with bundles; None: parts may be anywhere."""
        if self.group is None or any(not wanted for wanted in self.shares.values()):
            return None
        from ray.util.placement_group import placement_group_table

        return set(placement_group_table(self.group)["bundles_to_node_id"].values())

    def remove(self) -> None:
        """Free the resources. This kills the actors in the bundles."""
        if self.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.group)


def make_placement(config: Config) -> Placement:
    """Reserve the resources that the config requests on the connected cluster.

    Raises ConfigError if the cluster does not have as many, RunFailed if others use them for longer than
    cluster.placement.wait_s.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    cluster: Any = ray
    nodes = [node["Resources"] for node in cluster.nodes() if node["Alive"]]
    asked = shares(config, gpus=sum(node.get("GPU", 0.0) for node in nodes) > 0)
    if lack := lack_of_resources(asked, nodes):
        raise ConfigError(lack)
    wanted = {share.part: share.resources for share in asked}
    places = [(s.part, n) for s in asked if s.resources for n in range(s.actors)]
    if not places:
        return Placement(shares=wanted)
    settings = config.cluster.placement
    group = placement_group(
        [dict(wanted[part]) for part, _ in places], strategy=settings.strategy.upper(), name="staleflow"
    )
    if not group.wait(settings.wait_s):
        remove_placement_group(group)
        free = {name: amount for name, amount in cluster.available_resources().items() if _is_countable(name)}
        raise RunFailed(
            f"the cluster could not reserve the run's resources within {settings.wait_s:g} s "
            f"(cluster.placement.wait_s): {_sums(asked)}, with strategy {settings.strategy}; "
            f"free: {_amounts(free)}"
        )
    return Placement(group=group, bundles={place: n for n, place in enumerate(places)}, shares=wanted)


def shares(config: Config, *, gpus: bool) -> tuple[Share, ...]:
    """Resources of each part. `gpus`: whether the cluster has GPUs."""
    settings, evaluated = config.cluster.placement, bool(config.evaluation.every)
    on_cluster = config.cluster.address is not None
    engine = config.rollout.engine
    instance_gpus = _given(settings.rollout_gpus, _engine_gpus(config, engine) if gpus else 0)
    own = config.evaluation.engine
    evaluation_gpus = _given(settings.evaluation_gpus, _engine_gpus(config, own or engine) if gpus else 0)
    wanted: list[tuple[PartName, int, float | None, float, float]] = [
        # part, actors, configured CPUs, CPUs on an existing cluster if those are null, GPUs
        ("servers", 1, settings.servers_cpus, 1, 0),
        ("reward", 1, settings.reward_cpus, config.reward.workers, 0),
        ("evaluation", int(evaluated), settings.evaluation_cpus, 1, evaluation_gpus),
        (
            "training",
            training_ranks(config),
            settings.training_cpus,
            1,
            _given(settings.training_gpus, float(gpus and config.training.trainer == "deepspeed")),
        ),
        ("rollout", config.rollout.instances, settings.rollout_cpus, 1, instance_gpus),
    ]
    return tuple(
        Share(
            part=part,
            actors=actors,
            resources=_nonzero(
                {
                    "CPU": _given(cpus, default if on_cluster else 0),
                    "GPU": gpu,
                    **settings.resources.get(part, {}),
                }
            ),
        )
        for part, actors, cpus, default, gpu in wanted
    )


def training_ranks(config: Config) -> int:
    """Number of processes that train together."""
    return config.training.deepspeed.ranks if config.training.trainer == "deepspeed" else 1


def _engine_gpus(config: Config, engine: str) -> float:
    """GPUs that one engine uses if the cluster has GPUs."""
    return float(config.rollout.vllm.tensor_parallel) if engine == "vllm" else 0.0


def lack_of_resources(asked: Sequence[Share], nodes: Sequence[Resources]) -> str:
    """A sentence for the user if even idle `nodes` cannot provide what is asked for; else empty.

    Compares sums, and each bundle with each node. Bundles that pass may still not fit together on the nodes;
    then the wait for Ray reaches its limit.
    """
    has = {name: sum(node.get(name, 0.0) for node in nodes) for name in _names(asked)}
    wants = {name: sum(s.actors * s.resources.get(name, 0.0) for s in asked) for name in has}
    short = {name: wants[name] for name in has if wants[name] > has[name] + ROUNDING}
    if short:
        return (
            f"the run asks for {_amounts(short)}, but the cluster has {_amounts({n: has[n] for n in short})} "
            f"in {_count(len(nodes), 'node')}: {_sums(asked, short)}; use a larger cluster, or lower "
            "cluster.placement or the number of rollout.instances"
        )
    for share in asked:
        if share.actors and not any(_fits(share.resources, node) for node in nodes):
            largest = {name: max(node.get(name, 0.0) for node in nodes) for name in share.resources}
            return (
                f"one actor of {share.part} asks for {_amounts(share.resources)} on one node, but no node "
                f"has that (maximum of each: {_amounts(largest)}): lower it in cluster.placement"
            )
    return ""


def lack_of_gpus(config: Config, gpus: int) -> str:
    """The sentence of `lack_of_resources` about GPUs alone, for one machine with `gpus` GPUs; else empty."""
    asked = [
        Share(
            part=share.part,
            actors=share.actors,
            resources={name: amount for name, amount in share.resources.items() if name == "GPU"},
        )
        for share in shares(config, gpus=gpus > 0)
    ]
    return lack_of_resources(asked, [{"GPU": float(gpus)}])


def _names(asked: Sequence[Share]) -> list[str]:
    return list(dict.fromkeys(name for share in asked for name in share.resources))


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in wanted.items())


def _sums(asked: Sequence[Share], only: Resources | None = None) -> str:
    """`rollout 4 x (2 GPU, 1 CPU), ...` for the parts that need resources (of the kinds in `only`)."""

    def terms() -> Iterator[str]:
        for share in asked:
            shown = {n: a for n, a in share.resources.items() if only is None or n in only}
            if share.actors and shown:
                yield f"{share.part} {share.actors} x ({_amounts(shown)})"

    return ", ".join(terms())


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _is_countable(name: str) -> bool:
    """Whether a resource is not a node's address, memory in bytes, or a placement group's own entry."""
    return ":" not in name and "memory" not in name and "_group_" not in name


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _nonzero(resources: Resources) -> Resources:
    return {name: amount for name, amount in resources.items() if amount > 0}
