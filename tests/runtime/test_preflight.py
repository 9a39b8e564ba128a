"""The preflight: what is refused before anything exists, once each, and what a refusal leaves behind."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy import toy_config

from staleflow.config import Config
from staleflow.errors import ConfigError, RunFailed, RunFolderError
from staleflow.runtime import preflight
from staleflow.runtime.backends.ray.nodes import NodeReport, node_problem, report_node
from staleflow.runtime.launch import launch
from staleflow.runtime.preflight import (
    Check,
    prepare_plan,
    prepare_run,
    prepare_simulation,
    prepare_sweep,
    run_checks,
    run_problems,
    simulation_problems,
)


def free_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each check is made."""
    counts: Counter[str] = Counter()
    original = Check.__init__

    def counted(self: Check, *, name: str, make: Any, after: tuple[str, ...] = ()) -> None:
        def count() -> Any:
            counts[name] += 1
            return make()

        original(self, name=name, make=count, after=after)

    monkeypatch.setattr(Check, "__init__", counted)
    return counts


def test_a_run_makes_each_check_once(model: Path, tmp_path: Path, made: Counter[str]) -> None:
    config = toy_config(model, tmp_path, "run.steps=1")
    assert launch(config, resume=False, clean=False) == 0
    expected = {
        "reward.verifier",
        "model.source",
        "environment.name",
        "coordination",
        "coordination.cost_model",
        "rollout.fake.cost_model",
        "data",
        "run folder",
    }
    assert made == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_no_list_has_a_check_twice(model: Path, tmp_path: Path, address: str | None) -> None:
    config = toy_config(
        model,
        tmp_path,
        "cluster.runtime=ray",
        f"cluster.address={address or 'null'}",
        "evaluation.every=1",
        "evaluation.engine=torch",
        "training.algorithm=ppo",
        f"training.critic.source={model}",
        "training.kl.coefficient=0.1",
        f"training.kl.reference={model}",
    )
    names = [check.name for check in run_checks(config, resume=False, clean=False)]
    assert len(names) == len(set(names))
    assert names[-1] == "cluster"
    assert {"training.critic.source", "training.kl.reference", "run folder"} < set(names)


def test_a_cluster_that_refuses_leaves_no_folder_and_the_next_try_needs_no_clean(
    model: Path, tmp_path: Path
) -> None:
    config = toy_config(model, tmp_path, "cluster.runtime=ray", f"cluster.address=127.0.0.1:{free_port()}")
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"nothing listens at cluster\.address"):
            launch(config, resume=False, clean=False)
        assert list(tmp_path.iterdir()) == []


def test_places_that_do_not_fit_leave_no_folder_either(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(config: Config, folder: Path) -> None:
        assert folder == tmp_path / "toy"
        raise ConfigError("the run asks for 10 GPU, but the cluster has 8 GPU")

    monkeypatch.setattr(preflight, "build_cluster", refuses)
    config = toy_config(model, tmp_path, "cluster.runtime=ray")
    for _ in range(2):
        with pytest.raises(ConfigError, match="the cluster has 8 GPU"):
            launch(config, resume=False, clean=False)
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_ray_starts_ends_the_cluster_and_leaves_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may swallow the KeyboardInterrupt: the run would then go on."""
    closed: list[bool] = []

    class Cluster:
        def close(self) -> None:
            closed.append(True)

    def interrupted(config: Config, folder: Path) -> Cluster:
        os.kill(os.getpid(), signal.SIGINT)
        return Cluster()

    monkeypatch.setattr(preflight, "build_cluster", interrupted)
    config = toy_config(model, tmp_path, "cluster.runtime=ray")
    with pytest.raises(KeyboardInterrupt):
        launch(config, resume=False, clean=False)
    assert closed == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_is_left_alone_until_everything_else_is_right(
    model: Path, tmp_path: Path, made: Counter[str]
) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "ledger.jsonl").write_text("line\n")
    config = toy_config(model, tmp_path, "cluster.runtime=ray")
    with pytest.raises(RunFolderError, match="the run name 'toy' is in use"):
        prepare_run(config, resume=False, clean=False)
    assert made["run folder"] == 1
    assert made["cluster"] == 0


def test_a_run_is_resumed_only_with_the_config_that_it_had(model: Path, tmp_path: Path) -> None:
    assert launch(toy_config(model, tmp_path, "run.steps=1"), resume=False, clean=False) == 0
    other = toy_config(model, tmp_path, "run.steps=2", "data.group_size=4")
    with pytest.raises(RunFolderError, match=r"another data\.group_size \(was 3, now 4\)"):
        prepare_run(other, resume=True, clean=False)


def test_all_problems_are_listed_and_what_follows_from_another_is_left_out(
    model: Path, tmp_path: Path
) -> None:
    config = toy_config(
        model,
        tmp_path,
        "rollout.engine=nowhere.Engine",
        "reward.verifier=json.dumpz",
        f"model.source={tmp_path}/none",
        f"coordination.cost_model={tmp_path}/none.json",
        "data.source=jsonl",
        f"data.path={tmp_path}/none.jsonl",
    )
    problems = run_problems(config)
    starts = ["rollout engine 'nowhere.Engine'", "verifier 'json.dumpz'", "model.source:", "", "data.path:"]
    assert len(problems) == len(starts)  # reading the data would only repeat two of them
    assert all(problem.startswith(start) for problem, start in zip(problems, starts, strict=True))
    assert "none.json" in problems[3]
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_this_machine_lacks_are_named_without_starting_ray(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    wanted = ("cluster.runtime=ray", "rollout.instances=3", "cluster.placement.rollout_gpus=1")
    (problem,) = run_problems(toy_config(model, tmp_path, *wanted))
    assert problem.startswith(
        "the run asks for 3 GPU, but the cluster has 1 GPU in 1 node: rollout 3 x (1 GPU)"
    )
    assert run_problems(toy_config(model, tmp_path, *wanted, "rollout.instances=1")) == []


def test_simulate_plan_and_sweep_use_the_same_checks(model: Path, tmp_path: Path, made: Counter[str]) -> None:
    config = toy_config(model, tmp_path)
    assert simulation_problems(config) == []
    assert made == {"coordination": 1, "coordination.cost_model": 1, "simulation": 1, "run folder": 1}
    made.clear()
    prepare_plan(config)
    assert made == {"coordination": 1, "coordination.cost_model": 1}
    made.clear()
    prepare_sweep(config, simulated=False)
    assert made["data"] == 1
    assert "run folder" not in made
    broken = toy_config(model, tmp_path, f"coordination.cost_model={tmp_path}/none.json")
    for prepare in (
        lambda: prepare_simulation(broken, clean=False),
        lambda: prepare_plan(broken),
        lambda: prepare_sweep(broken, simulated=True),
        lambda: prepare_sweep(broken, simulated=False),
        lambda: prepare_run(broken, resume=False, clean=False),
    ):
        with pytest.raises(ConfigError, match=r"none\.json"):
            prepare()
    assert list(tmp_path.iterdir()) == []


def test_an_algorithm_of_ones_own_with_a_critic_is_not_for_deepspeed(model: Path, tmp_path: Path) -> None:
    config = toy_config(
        model,
        tmp_path,
        "training.trainer=deepspeed",
        "training.algorithm=staleflow.training.algorithms.ppo.PPO",
        "training.dynamic_sampling=false",
    )
    assert any("has a critic, which only the torch trainer trains" in p for p in run_problems(config))


def test_a_node_reports_what_it_does_not_see(tmp_path: Path) -> None:
    here, gone = str(tmp_path), str(tmp_path / "gone")
    paths = [("run.output_dir", here), ("data.path", gone)]
    report = report_node([here, gone])
    assert report.missing_paths == (gone,)
    assert node_problem(report, paths) == (
        f"does not see {gone} (data.path): put it where every node sees it under this path"
    )
    assert node_problem(report, paths[:1]) == ""
    old = NodeReport(version="0.0.1", missing_paths=())
    assert node_problem(old, paths).startswith("has staleflow 0.0.1, but this is ")
