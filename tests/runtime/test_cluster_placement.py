"""What a run asks of a cluster, and what it says when there is not as much."""

from __future__ import annotations

from typing import Any

import pytest

from staleflow.config import load_config
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.runtime.backends.ray.placement import Placement, Share, lack_of_resources, shares


def config(*settings: str) -> Config:
    return load_config([], list(settings), {})


def asked(*settings: str, gpus: bool = False) -> dict[str, tuple[int, dict[str, float]]]:
    return {s.part: (s.actors, dict(s.resources)) for s in shares(config(*settings), gpus=gpus)}


def test_on_a_local_cluster_of_cpus_nobody_asks_for_anything() -> None:
    assert {tuple(wanted) for _, wanted in asked().values()} == {()}


def test_on_an_existing_cluster_each_actor_asks_for_a_cpu_and_rewards_for_one_a_worker() -> None:
    one = {"CPU": 1.0}
    assert asked("cluster.address=h:1", "reward.workers=3", "rollout.instances=4") == {
        "servers": (1, one),
        "reward": (1, {"CPU": 3.0}),
        "evaluation": (1, one),
        "training": (1, one),
        "rollout": (4, one),
    }


def test_an_evaluation_that_never_comes_has_no_actor() -> None:
    assert asked("cluster.address=h:1", "evaluation.every=0")["evaluation"][0] == 0


def test_what_computes_on_gpus_gets_them_where_there_are_any() -> None:
    settings = (
        "rollout.engine=vllm",
        "rollout.vllm.tensor_parallel=4",
        "training.trainer=deepspeed",
        "training.deepspeed.ranks=8",
    )
    with_gpus = asked(*settings, gpus=True)
    assert with_gpus["rollout"] == (2, {"GPU": 4.0})
    assert with_gpus["training"] == (8, {"GPU": 1.0})
    assert with_gpus["evaluation"] == (1, {"GPU": 4.0})
    assert {tuple(wanted) for _, wanted in asked(*settings, gpus=False).values()} == {()}
    torch = asked(*settings, "evaluation.engine=torch", gpus=True)
    assert torch["evaluation"] == (1, {})


def test_amounts_and_resources_of_ones_own_are_taken_as_given() -> None:
    wanted = asked(
        "cluster.placement.rollout_gpus=0.5",
        "cluster.placement.rollout_cpus=2",
        "cluster.placement.training_cpus=0",
        "cluster.placement.resources={training: {big: 1}}",
    )
    assert wanted["rollout"] == (2, {"CPU": 2.0, "GPU": 0.5})
    assert wanted["training"] == (1, {"big": 1.0})


def share(part: Any, actors: int, **resources: float) -> Share:
    return Share(part=part, actors=actors, resources=resources)


def test_a_cluster_too_small_is_told_with_the_sums() -> None:
    wanted = [share("servers", 1, CPU=1), share("training", 2, CPU=1, GPU=1), share("rollout", 4, GPU=2)]
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}]
    assert lack_of_resources(wanted, nodes) == (
        "the run asks for 10 GPU, but the cluster has 8 GPU in 2 nodes: training 2 x (1 GPU), "
        "rollout 4 x (2 GPU); use a larger cluster, or lower cluster.placement or the number of "
        "rollout.instances"
    )


def test_an_instance_needs_its_gpus_on_one_node() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}]
    assert lack_of_resources([share("rollout", 1, GPU=8)], nodes) == (
        "one actor of rollout asks for 8 GPU on one node, but no node has that (maximum of each: 4 GPU): "
        "lower it in cluster.placement"
    )


def test_what_fits_is_not_complained_of() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 2.0}]
    assert lack_of_resources([share("rollout", 4, CPU=1), share("evaluation", 0, GPU=8)], nodes) == ""
    assert lack_of_resources([], []) == ""
    thirds = [share("evaluation", 1, GPU=0.3), share("training", 3, GPU=0.2), share("rollout", 1, GPU=0.1)]
    assert 0.3 + 3 * 0.2 + 0.1 > 1
    assert lack_of_resources(thirds, [{"GPU": 1.0}]) == ""


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["cluster.placement.rollout_gpus=1.5"], "rollout_gpus"),
        (
            ["rollout.engine=vllm", "rollout.vllm.tensor_parallel=2", "cluster.placement.rollout_gpus=1"],
            "rollout_gpus",
        ),
        (
            [
                "training.trainer=deepspeed",
                "training.deepspeed.ranks=2",
                "cluster.placement.training_gpus=0.5",
            ],
            "training_gpus",
        ),
    ],
)
def test_amounts_of_gpus_that_cannot_work_are_refused(settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.placement\.{key}"):
        config(*settings)


def test_without_a_group_options_ask_for_gpus_at_most() -> None:
    assert Placement().options("rollout", 5) == {"num_cpus": 0}
    assert Placement(shares={"rollout": {"GPU": 2.0}}).options("rollout") == {"num_cpus": 0, "num_gpus": 2.0}


def test_an_actor_beyond_those_that_were_planned_has_no_place() -> None:
    placement = Placement(group=object(), bundles={("rollout", 0): 0}, shares={"rollout": {"CPU": 1.0}})
    with pytest.raises(ValueError, match="rollout has no bundle number 1"):
        placement.options("rollout", 1)
