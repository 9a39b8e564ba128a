"""From a config to a simulated cluster, and refusals that show their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.config import load_config
from staleflow.coordination.cost_model import CostModel
from staleflow.errors import ConfigError, UserError
from staleflow.simulation.hardware import cluster_settings, find_context, recorded_lengths
from staleflow.simulation.response_lengths import fixed
from staleflow.simulation.settings import ClusterSettings, Outage, Slowdown, TrainerCosts
from staleflow.storage.cost_file import save_cost_model

LARGE = [
    "data.batch_size=128",
    "data.group_size=16",
    "rollout.max_new_tokens=20480",
    "rollout.max_running=256",
    "rollout.kv_capacity_tokens=32768",
    "training.micro_batch_tokens=32768",
    "simulation.prompt_tokens=2048",
]


def settings(*overrides: str) -> ClusterSettings:
    return cluster_settings(load_config([], [*LARGE, *overrides]))


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        settings(*overrides)
    return str(caught.value)


def test_the_defaults_are_qwen_14b_on_64_h20() -> None:
    cluster = settings()
    assert (cluster.instances, cluster.kv_capacity, cluster.max_running) == (16, 289_204, 256)
    assert cluster.costs.k1 == pytest.approx(196_608 / 3.2e12)
    assert (cluster.prompt_length, cluster.max_new_tokens, cluster.group_size) == (2048, 20480, 16)


def test_keys_of_a_real_run_mean_the_same() -> None:
    cluster = settings(
        "redundancy.members=2", "rollout.on_pull=keep_kv", "coordination.interval_ms=20", "data.size=1000"
    )
    assert (cluster.surplus, cluster.on_pull, cluster.interval_s) == (2, "keep_kv", 0.02)
    assert cluster.prompts is None
    assert settings("data.size=1000", "data.epochs=3").prompts == 3000


def test_policy_sync_has_all_gpus_for_both_phases_and_pays_for_the_changes() -> None:
    apart, together = (
        settings("simulation.latencies.switch_s=7.0"),
        settings("simulation.latencies.switch_s=7.0", "coordination.policy=sync"),
    )
    assert (apart.instances, together.instances) == (16, 64)
    assert together.trainer.token_s == pytest.approx(apart.trainer.token_s * 48 / 64)
    update = 30 * 14_770_033_664 / 3.2e12
    reduced = 4 * 14_770_033_664 / 40e9
    assert apart.trainer.fixed_s == pytest.approx(2.0 + update / 48 + reduced)
    assert together.trainer.fixed_s == pytest.approx(2.0 + update / 64 + reduced + 7.0)
    shard = 2 * 14_770_033_664 / 40e9
    assert apart.trainer.push_s == pytest.approx(0.5 + shard / 48)
    assert together.trainer.push_s == pytest.approx(0.5 + shard / 64 + 7.0)
    assert together.costs == apart.costs


def test_mean_contexts_by_hand() -> None:
    """Responses of 1,000 after 2,048: 500 of them held on average; a token attends to 1,524 positions."""
    context = find_context(load_config([], LARGE), fixed(1000))
    assert context.held == 2048 + 500
    assert context.attended == 3048 / 2


def test_a_model_that_does_not_fit_is_refused_with_the_sum() -> None:
    said = refusal(
        "simulation.model=qwen2.5-32b", "simulation.gpu=H100", "simulation.efficiency.kv_memory=0.85"
    )
    assert said.startswith("the weights leave too little: 1 x 80 GB (H100) x 0.85 (kv_memory) - 65.5 GB")
    assert "= 2.5 GB, at 262.1 kB a token 9,430 tokens" in said
    assert "2,048 (simulation.prompt_tokens) + 20,480 (rollout.max_new_tokens) + 1 = 22,529" in said
    assert said.endswith("simulation.tensor_parallel must be at least 2")


def test_weights_alone_that_do_not_fit_are_refused() -> None:
    said = refusal("simulation.model=qwen2.5-32b", "simulation.efficiency.kv_memory=0.6")
    assert said.startswith("the weights do not fit: 1 x 96 GB (H20) x 0.6 (kv_memory) - 65.5 GB")
    assert "= -7.9 GB" in said


def test_too_few_training_gpus_are_refused_with_the_sum() -> None:
    said = refusal("simulation.training_gpus=3")
    assert "x 16 bytes = 236 GB on GPUs of 96 GB x 0.8 (training_memory)" in said
    assert said.endswith("must be at least 4")


def test_instances_that_all_die_are_refused() -> None:
    outages = "simulation.outages=[{at: 1.0, instance: 0}, {at: 2.0, instance: 1}]"
    assert "ends all 2 instances for good" in refusal("simulation.rollout_gpus=2", outages)
    cluster = settings("simulation.rollout_gpus=3", outages)
    assert cluster.outages == (
        Outage(at=1.0, instance=0, down_s=None),
        Outage(at=2.0, instance=1, down_s=None),
    )


def test_slowdowns_are_taken_over() -> None:
    cluster = settings("simulation.slowdowns=[{at: 1.0, instance: 0, factor: 2.0}]")
    assert cluster.slowdowns == (Slowdown(at=1.0, instance=0, factor=2.0),)


def test_epochs_need_to_know_the_number_of_prompts() -> None:
    assert "set data.size to their number" in refusal("data.epochs=1")


def test_measured_costs_replace_the_roofline(tmp_path: Path) -> None:
    costs = CostModel(k1=1e-6, k2=2e-3, k3=3e-4, k4=4e-3, prefill=5e-5, pull=0.5)
    path = tmp_path / "costs.json"
    save_cost_model(path, costs, {})
    cluster = settings(
        f"simulation.costs={path}",
        "rollout.instances=3",
        "simulation.training.fixed_s=1.0",
        "simulation.training.token_s=1e-5",
        "simulation.training.push_s=0.25",
    )
    assert cluster.costs == costs
    assert (cluster.instances, cluster.kv_capacity) == (3, 32768)
    assert cluster.trainer == TrainerCosts(fixed_s=1.0, token_s=1e-5, push_s=0.25)


def test_stated_seconds_replace_those_worked_out() -> None:
    trainer = settings("simulation.training.fixed_s=9.0").trainer
    assert trainer.fixed_s == 9.0
    assert trainer.token_s == settings().trainer.token_s


def test_the_median_is_a_quarter_of_the_limit_unless_stated() -> None:
    members = [f"e0-p0-a0-m{m}" for m in range(3)]
    assert settings("simulation.lengths.kind=fixed").lengths("e0-p0", members) == [5120] * 3
    stated = settings("simulation.lengths.kind=fixed", "simulation.lengths.median=700.0")
    assert stated.lengths("e0-p0", members) == [700] * 3


def test_bimodal_lengths_have_both_modes() -> None:
    lengths = settings(
        "simulation.lengths.kind=bimodal",
        "simulation.lengths.sigma=0.0",
        "simulation.lengths.long_share=0.5",
    ).lengths
    assert {lengths(f"e0-p{p}", [f"e0-p{p}-a0-m0"])[0] for p in range(40)} == {500, 8000}


def test_recorded_lengths_are_replayed_by_group(tmp_path: Path) -> None:
    lines = [
        {"t": 0.0, "k": "begin", "a": 1},
        {"t": 1.0, "k": "done", "id": "e0-p0-a0-m0", "l": 9, "runs": [[0, 5]]},
        {"t": 1.0, "k": "done", "id": "e0-p0-a0-m1", "l": 14, "runs": [[0, 3], [-1, 2], [1, 4]]},
        {"t": 1.0, "k": "done", "id": "e0-p1-a0-m0", "l": 6, "runs": [[1, 2]]},
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recorded_lengths(tmp_path) == [[5, 7], [2]]
    lengths = settings("simulation.lengths.kind=replay", f"simulation.lengths.path={tmp_path}").lengths
    drawn = {tuple(lengths(f"e0-p{p}", ["m0", "m1"])) for p in range(40)}
    assert drawn == {(5, 7), (2, 2)}


def test_a_folder_without_a_journal_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no journal\.jsonl"):
        recorded_lengths(tmp_path)


def test_rewards_are_chance_with_a_seed() -> None:
    cluster, other = settings("simulation.solved=0.25"), settings("simulation.solved=0.25", "run.seed=1")
    rewards = [cluster.reward(f"e0-p{n}-a0-m0") for n in range(2000)]
    assert set(rewards) == {0.0, 1.0}
    assert 0.2 < sum(rewards) / 2000 < 0.3
    assert rewards != [other.reward(f"e0-p{n}-a0-m0") for n in range(2000)]
    assert settings("simulation.solved=1.0").reward("e0-p0-a0-m0") == 1.0


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a known model"):
        settings("simulation.model=gpt")
