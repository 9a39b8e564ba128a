"""Wrong configs are refused with one line per problem that says what was meant (F32, F6, F13)."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.config import Config, load_config
from staleflow.config.key_names import ALIASES, key_paths
from staleflow.errors import ConfigError


def problems(
    *overrides: str, environ: dict[str, str] | None = None, paths: list[Path] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(paths or [], overrides, environ)
    lines = str(caught.value).split("\n  ")
    return lines if len(lines) == 1 else lines[1:]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("staleness.eat=2", "staleness.bound (also called eta)"),
        ("eta=2", "staleness.bound (also called eta)"),
        ("stalness.bound=2", "staleness.bound"),
        ("bound=2", "staleness.bound"),
        ("training.lr=0.1", "training.learning_rate (also called lr)"),
        ("training.learning_rte=0.1", "training.learning_rate"),
        ("max_new_tokens=8", "evaluation.max_new_tokens or rollout.max_new_tokens"),
        ("wandb.mode=online", "telemetry.wandb.mode"),
        ("rollout.fake.length.max=3", "rollout.fake.lengths.max"),
        ("trainig={minibatches: 2, threads: 1}", "training"),
        ("data={batchsize: 3}", "data.batch_size"),
        ("rollout.vllm.gpu_mem=0.5", "rollout.vllm.gpu_memory_utilization"),
        ("training.critic.lr=0.1", "training.critic.learning_rate (also called lr)"),
        ("rollout.tp=2", "rollout.vllm.tensor_parallel (also called tp)"),
        ("cluster.placement.resources={trainng: {a: 1}}", "training"),
    ],
)
def test_a_mistyped_key_is_refused_with_what_was_meant(override: str, meant: str) -> None:
    """F32"""
    (line,) = problems(override)
    assert "unknown key (read" in line
    assert f"did you mean {meant}?" in line


def test_the_message_names_key_value_and_place(tmp_path: Path) -> None:
    """F32: command line, environment and file alike."""
    expected = "did you mean staleness.bound (also called eta)?"
    assert problems("staleness.eat=2") == [
        f"staleness.eat: unknown key (read 2 from the command line); {expected}"
    ]
    assert problems(environ={"STALEFLOW__STALENESS__EAT": "2"}) == [
        "staleness.eat: unknown key (read 2 from the environment variable STALEFLOW__STALENESS__EAT); "
        + expected
    ]
    path = tmp_path / "c.yaml"
    path.write_text("run:\n  seed: 1\nstaleness:\n  eat: 2\n")
    assert problems(paths=[path]) == [f"staleness.eat: unknown key (read 2 from {path}:4); {expected}"]


def test_a_key_like_nothing_gets_the_keys_there_are() -> None:
    (line,) = problems("checkpoint.zzzzzzz=1")
    assert line.endswith("section checkpoint has every, keep")


def test_wrong_elements_of_lists_are_named() -> None:
    """F32"""
    assert problems("training.betas=[0.9, high]") == [
        "training.betas.1: read high from the command line; allowed: a number"
    ]
    (line,) = problems("training.betas.0=0.5")
    assert "training.betas" in line
    assert "a list" in line


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("run.steps=0", "at least 1"),
        ("run.seed=-1", "at least 0"),
        ("run.seed=1.0", "a whole number"),
        ("run.seed=true", "a whole number"),
        ("run.steps='3'", "a whole number"),
        ("run.name=7", "text (in quotes if it looks like a number) or null"),
        ("run.output_dir=''", "text that is not empty"),
        ("data.shuffle=1", "true or false"),
        ("data.epochs=0", "at least 1 or null"),
        ("training.learning_rate=.inf", "a finite number"),
        ("training.learning_rate=.nan", "a finite number"),
        ("training.learning_rate=0", "more than 0"),
        ("training.clip_low=1.5", "at most 1"),
        ("coordination.routing.kv_headroom=1", "less than 1"),
        ("rollout.top_p=1.1", "at most 1"),
        ("training=3", "a map of keys"),
        ("training=", "a map of keys"),
        ("training.betas=[0.9]", "a longer list"),
        ("training.betas=[0.9, 0.9, 0.9]", "a list of 2"),
        ("data.last_batch=trian", "train, drop, pad; did you mean train?"),
        ("rollout.engine=vlm", "torch, vllm, fake, or a dotted path such as my_package.my_name"),
        ("training.algorithm=grppo", "my_package.my_name; did you mean grpo?"),
        ("evaluation.engine=vlm", "my_package.my_name or null; did you mean vllm?"),
        ("reward.verifier=exact-match", "exact_match, reasoning_gym, math_verify, or a dotted path"),
        ("data.source='reasoning_gym:'", "reasoning_gym:<task>"),
        ("environment.name=singleturn", "my_package.my_name; did you mean single_turn?"),
        ("environment.workers=0", "at least 1"),
        ("environment.timeout_s=0", "more than 0"),
        ("coordination.routing.strategy=watrfall", "my_package.my_name or null; did you mean waterfall?"),
        ("coordination.synchronization.strategy=selektive", "did you mean selective?"),
        ("coordination.migration.strategy=cost", "cost_aware, naive, or a dotted path"),
        ("cluster.transport=shm", "auto, shared_memory, object_store, device, memory, or a dotted path"),
        ("telemetry.sinks=jsonl", "a list"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(override: str, allowed: str) -> None:
    (line,) = problems(override)
    assert line.startswith(override.partition("=")[0])
    assert allowed in line


def test_a_sink_is_a_name_or_a_map() -> None:
    config = load_config([], ["telemetry.sinks=[my.Sink, {name: jsonl, options: {path: a.jsonl}}]"])
    assert [(sink.name, sink.options) for sink in config.telemetry.sinks] == [
        ("my.Sink", {}),
        ("jsonl", {"path": "a.jsonl"}),
    ]
    (line,) = problems("telemetry.sinks=[my.Sink, jsnol]")
    assert line.startswith("telemetry.sinks.1.name: read jsnol")
    assert line.endswith("did you mean jsonl?")


def test_a_list_of_outages_is_checked_element_by_element() -> None:
    config = load_config([], ["simulation.outages=[{at: 3.0, instance: 1}, {at: 4, instance: 1, down_s: 5}]"])
    assert [outage.down_s for outage in config.simulation.outages] == [None, 5.0]
    (line,) = problems("simulation.outages=[{at: -3.0, instance: 1}]")
    assert line == "simulation.outages.0.at: read -3.0 from the command line; allowed: at least 0.0"
    (line,) = problems("simulation.slowdowns=[{at: 3.0, instance: 1}]")
    assert line.startswith("simulation.slowdowns.0: read")
    assert line.endswith("allowed: a map that has factor")
    (line,) = problems("simulation.slowdowns=[{at: 3.0, instance: 1, factr: 2.0, factor: 1.0}]")
    assert line.startswith("simulation.slowdowns.0.factr: unknown key")
    assert line.endswith("an element of simulation.slowdowns has at, instance, factor")


def test_all_problems_are_listed_a_line_each() -> None:
    lines = problems("run.steps=0", "staleness.eat=2", "telemetry.console=loud")
    assert sorted(line.partition(":")[0] for line in lines) == [
        "run.steps",
        "staleness.eat",
        "telemetry.console",
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["training.correction=none"], "training.correction", "needs a correction: set tis or another"),  # F6
        (["data.group_size=1"], "data.group_size", "at least 2"),  # F26
        (["training.minibatches=25"], "training.minibatches", "a batch of 24 groups"),
        (["rollout.top_p=0.9"], "rollout.top_p", "the whole distribution"),  # F13
        (["rollout.top_k=5"], "rollout.top_k", "the whole distribution"),  # F13
        (["rollout.max_model_len=48"], "rollout.max_new_tokens", "at most 47"),
        (["training.micro_batch_tokens=48"], "training.micro_batch_tokens", "at least 49"),
        (["rollout.kv_capacity_tokens=40"], "rollout.kv_capacity_tokens", "at least 49"),
        (["training.overlong_buffer=97"], "training.overlong_buffer", "longer than a response"),
        (["training.overlong_penalty=1.0"], "training.overlong_penalty", "no effect without"),
        (["data.source=jsonl"], "data.path", "needs the path of its file"),
        (["data.path=x.jsonl"], "data.path", "does not read a file"),
        (["data.size=10"], "data.batch_size", "data.size 10"),
        (["cluster.runtime=inline", "cluster.address=auto"], "cluster.address", "uses no cluster"),
        (
            [
                "evaluation.engine=vllm",
                "rollout.vllm.tensor_parallel=2",
                "cluster.placement.evaluation_gpus=1",
            ],
            "cluster.placement.evaluation_gpus",
            "tensor_parallel needs 2",
        ),
        (["cluster.runtime=inline", "cluster.transport=device"], "cluster.transport", "no nodes"),
        (["cluster.transport=memory"], "cluster.transport", "works within one process"),
        (["cluster.transport_options={a: 1}"], "cluster.transport_options", "a transport of your own"),
        (["coordination.migration.options={a: 1}"], "coordination.migration.options", "of your own"),
        (
            ["cluster.runtime=inline", "cluster.shared_memory_dir=/x"],
            "cluster.shared_memory_dir",
            "in its own memory",
        ),
        (["cluster.ship=[/x]"], "cluster.ship", "existing cluster only"),
        (["evaluation.max_new_tokens=8192"], "evaluation.max_new_tokens", "more than an instance holds"),
        (["rollout.lost_after_s=0.5"], "rollout.progress_interval_s", "would count as lost"),
        (
            ["redundancy.groups=1", "coordination.policy=strict_queue"],
            "redundancy.groups",
            "policy strict_queue starts no spare groups",
        ),
        (
            ["redundancy.groups=1", "coordination.routing.strategy=naive"],
            "redundancy.groups",
            "naive routing starts no spare groups",
        ),
        (["simulation.tensor_parallel=3"], "simulation.rollout_gpus", "not a multiple of simulation.tensor"),
        (
            ["simulation.tensor_parallel=5", "coordination.policy=sync"],
            "simulation.rollout_gpus",
            "together with simulation.training_gpus, 48, it is not a multiple",
        ),
        (
            ["simulation.lengths.kind=replay"],
            "simulation.lengths.path",
            "needs the folder of a run",
        ),
        (
            ["simulation.lengths.path=runs/a"],
            "simulation.lengths.path",
            "is read only with",
        ),
        (
            ["simulation.costs=c.json", "simulation.training.token_s=1e-5", "simulation.training.push_s=0.0"],
            "simulation.training.fixed_s",
            "it cannot be derived from a model",
        ),
        (
            ["simulation.outages=[{at: 3.0, instance: 16}]"],
            "simulation.outages",
            "there is no instance 16: the 16 instances are counted from 0",
        ),
    ],
)
def test_an_impossible_combination_is_refused_with_its_reason(
    overrides: list[str], key: str, reason: str
) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(f"{key}: read ")
    assert reason in line


def test_no_correction_is_fine_without_staleness() -> None:
    assert load_config([], ["training.correction=none", "staleness.bound=0"]).training.correction == "none"


def test_dotted_paths_and_tasks_are_names_too() -> None:
    config = load_config([], ["reward.verifier=my_pkg.score", "data.source=reasoning_gym:chain_sum"])
    assert (config.reward.verifier, config.data.source) == ("my_pkg.score", "reasoning_gym:chain_sum")


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().run.seed = 3  # type: ignore[misc]


def test_aliases_lead_to_keys_and_are_none_themselves() -> None:
    keys = {".".join(path) for path, _ in key_paths(Config)}
    assert set(ALIASES.values()) <= keys
    assert not {f"{t.rpartition('.')[0]}.{a}" for a, t in ALIASES.items()} & keys


def test_an_error_comes_within_a_second_and_without_torch_or_ray() -> None:
    code = (
        "import sys, staleflow.cli.main as m\n"
        "sys.argv = ['staleflow', 'run', 'staleness.eat=2']\n"
        "try:\n    m.main()\n"
        "except SystemExit as e:\n    assert e.code == 2, e.code\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "did you mean staleness.bound" in done.stderr
    # Processor time: other processes may share these cores, and nothing here waits for anything else.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (
            ["training.algorithm=ppo"],
            "training.trainer",
            "ppo has a critic, which only the torch trainer trains",
        ),
        (["model.dtype=float16"], "model.dtype", "supports float32 and bfloat16"),
        (
            ["model.dtype=bfloat16", "training.deepspeed.zero_stage=0"],
            "training.deepspeed.zero_stage",
            "needs stage 1, 2 or 3",
        ),
        (
            ["training.deepspeed.offload_optimizer=true", "training.deepspeed.zero_stage=0"],
            "training.deepspeed.offload_optimizer",
            "zero_stage 1, 2 or 3",
        ),
    ],
)
def test_what_the_deepspeed_trainer_does_not_do_is_refused(
    overrides: list[str], key: str, reason: str
) -> None:
    (line,) = problems("training.trainer=deepspeed", *overrides)
    assert line.startswith(key)
    assert reason in line
