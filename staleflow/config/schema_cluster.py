"""The section `cluster` of the schema: where the parts run, and how weights are transferred between nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from staleflow.config.base import Section, TransportName

PartName = Literal["servers", "reward", "evaluation", "training", "rollout"]
Amount = Annotated[float, Field(ge=0)]


class ClusterPlacement(Section):
    """Resources of each part's actors, reserved as bundles of one Ray placement group. Without amounts an
    actor may run anywhere."""

    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """pack: on few nodes; spread: on many; strict_pack: on one; strict_spread: each actor on its own node."""
    rollout_gpus: Amount | None = None
    """GPUs of one rollout instance, all on one node. Null: rollout.vllm.tensor_parallel for vllm, else 0."""
    rollout_cpus: Amount | None = None
    """CPUs of one rollout instance. Null: 1 on an existing cluster, 0 on a local one."""
    training_gpus: Amount | None = None
    """GPUs of one training rank. Null: 1 for the deepspeed trainer where there are GPUs, else 0."""
    training_cpus: Amount | None = None
    """CPUs of one training rank. Null: 1 on an existing cluster, 0 on a local one."""
    evaluation_gpus: Amount | None = None
    """GPUs of the evaluation, if any. Null: the rule of rollout_gpus for the evaluation's engine."""
    evaluation_cpus: Amount | None = None
    """CPUs of the evaluation, if any. Null: 1 on an existing cluster, 0 on a local one."""
    reward_cpus: Amount | None = None
    """CPUs of the verifiers. Null: reward.workers on an existing cluster, 0 on a local one."""
    servers_cpus: Amount | None = None
    """CPUs of the run loop with the trajectory server. Null: 1 on an existing cluster, 0 on a local one."""
    resources: dict[PartName, dict[str, Amount]] = Field(default_factory=dict)
    """Custom Ray resources that each actor of a part also requires, to choose its nodes."""
    wait_s: float = Field(default=120.0, gt=0)
    """Seconds to wait for resources that others in the cluster are using."""


class Cluster(Section):
    """Where the parts run."""

    runtime: Literal["ray", "inline"] = "ray"
    """ray: each part in its own process; inline: one process, deterministic, for tests and debugging."""
    address: str | None = None
    """Address of a running Ray cluster (host:port, or auto). Null: a local one, stopped at the end."""
    ship: Annotated[tuple[str, ...], Strict(False)] = ()
    """Your own Python packages (folders or .py files) to send to every node of an existing cluster."""
    transport: TransportName = "auto"
    """How weights reach the instances. memory: in an inline run; shared_memory: on one node; object_store:
    Ray's, between nodes; device: NIXL, by Ray's direct transport, between nodes; or the dotted path of your
    own class (docs/extending.md). auto: inline memory, on a local cluster shared_memory, on an existing one
    device where it works, else object_store."""
    transport_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a transport of your own."""
    transfer_mb: int = Field(default=64, ge=1)
    """MiB per piece of weights sent to another node. Ray's object store holds at most four pieces."""
    shared_memory_dir: str | None = None
    """Folder for weights in shared memory, on every node. Null: /dev/shm."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which all parts must have started. vLLM alone takes 20 or more."""
    placement: ClusterPlacement = ClusterPlacement()
