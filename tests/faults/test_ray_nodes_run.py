"""A whole run on several raylets: parts where they should be, a node killed, another joined."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table
from test_ray_run import RUNTIME_TESTS, Command

from staleflow.audit import audit_ledger

sys.path.insert(0, str(RUNTIME_TESTS))

from ray_cluster import LIMIT_S, Cluster, connected, wait_until
from toy import make_model_folder

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


def test_a_run_on_three_nodes_outlives_one_and_takes_in_another(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are where the config says; kill -9 of a raylet costs its instance, and one that joins gets it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = "cluster.placement.resources={servers: {node_0: 1}, reward: {node_0: 1}, training: {node_0: 1}}"
    model = make_model_folder(tmp_path / "model")
    command = Command(
        model,
        tmp_path,
        "run.steps=500",
        "data.size=3000",
        f"cluster.address={cluster.address}",
        "cluster.placement.rollout_cpus=4",  # all of a node
        head,
    )

    def until_step(step: int) -> None:
        command.wait_for(lambda: len(command.rows("train")) > step, LIMIT_S, f"step {step}")

    try:
        until_step(1)
        assert cluster.actors(0) >= {
            "TrajectoryServerActor",
            "WeightDirectoryActor",
            "RewardActor",
            "TrainerActor",
        }
        for number in (1, 2):
            assert {"RolloutActor", "WeightHolder"} <= cluster.actors(number)
            assert "TrainerActor" not in cluster.actors(number)
        cluster.raylet(2).kill()

        def said(name: str) -> int:
            return sum(row["event/name"] == name for row in command.rows("event"))

        command.wait_for(lambda: said("instance_down"), LIMIT_S, "news of the lost instance")
        steps = len(command.rows("train"))
        until_step(steps + 2)  # the other instance has its trajectories
        joined = said("instance_up")
        cluster.add_node()
        command.wait_for(lambda: said("instance_up") > joined, LIMIT_S, "the instance on the new node")
        until_step(len(command.rows("train")) + 1)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.end() == 130, command.output.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            command.process.kill()
        command.process.wait(10)
    report = audit_ledger(command.folder)
    assert report.violations == ()
    assert report.max_staleness <= 1
    left = {"RolloutActor", "WeightHolder", "TrainerActor", "TrajectoryServerActor", "RewardActor"}
    wait_until(
        lambda: not left & (cluster.actors(0) | cluster.actors(1) | cluster.actors(3)), "end of actors"
    )
    with connected(cluster):
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    wait_until(lambda: list(command.shared.glob("staleflow-ps-*")) == [], "empty shared memory")
