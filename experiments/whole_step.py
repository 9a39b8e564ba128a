"""A whole step, generation, scoring and update, of staleflow beside TRL's GRPOTrainer.

Both train the built-in task from the same weights with the same batch (24 prompts x 8 responses of at most
48 tokens), loss (DAPO's, no KL term), float32, learning rate and one optimizer update a step, on every
response: groups whose rewards are all equal are not dropped. Both have all cores, and both are tried in the
two ways that suit two cores, of which the better one counts: TRL with one and with two threads, staleflow
with one rollout instance that has all the places and with two that have half of them. The rate is response
tokens trained on for each second of wall time between the end of the first step and the end of the last, so
that neither start is in it. The systems take turns, round by round, because other work on the machine slows
them all; the best round of each counts. Evaluation, checkpoints and W&B are off in both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from staleflow.config.load import load_config
from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.runtime.assembly import build_source, build_tokenizer
from staleflow.training.models import model_folder

COLUMNS = ("system", "tokens/s", "of TRL", "s a step", "length", "reward", "staleness, at most")
OFF = ("evaluation.every=0", "checkpoint.every=0", "telemetry.wandb.mode=disabled", "telemetry.console=off")
SAME = ("training.dynamic_sampling=false", "data.shuffle=true")


def trl_rate(config: Config, steps: int) -> dict[str, float]:
    """Train with TRL in this process, and say how fast it was."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    folder, data = model_folder(config.model.source), config.data
    source = build_source(config, build_tokenizer(config))
    prompts = [source.prompt(i) for i in range(min(len(source), (steps + 1) * data.batch_size))]
    tokens: list[int] = []
    rewards: list[float] = []
    ends: list[float] = []

    def reward(completions: list[str], answer: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        scores = [
            float(text.split("=")[-1] == right) for text, right in zip(completions, answer, strict=True)
        ]
        rewards.append(sum(scores) / len(scores))
        return scores

    class Ends(TrainerCallback):
        """When each step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    training = config.training
    with tempfile.TemporaryDirectory() as output:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": p.text, "answer": str(p.answer)} for p in prompts]),
            callbacks=[Ends()],
            args=GRPOConfig(
                output_dir=output,
                max_steps=steps,
                per_device_train_batch_size=data.batch_size * data.group_size,
                gradient_accumulation_steps=1,
                num_generations=data.group_size,
                max_completion_length=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                top_k=0,
                beta=0.0,
                loss_type="dapo",
                epsilon=training.clip_low,
                epsilon_high=training.clip_high,
                learning_rate=training.learning_rate,
                warmup_steps=training.warmup_steps,
                lr_scheduler_type="constant_with_warmup",
                adam_beta2=training.betas[1],
                max_grad_norm=training.max_grad_norm,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                seed=config.run.seed,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
        ).train()
    return {
        "tokens_per_s": sum(tokens[1:steps]) / (ends[-1] - ends[0]),
        "step_s": (ends[-1] - ends[0]) / (steps - 1),
        "response_len": sum(tokens) / len(tokens) / (data.batch_size * data.group_size),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
    }


def staleflow_rate(bound: int, instances: int, steps: int, output: Path) -> dict[str, float]:
    """Run `staleflow run` with the default config, and read how fast it was from its metrics."""
    name = f"eta{bound}-{time.monotonic_ns()}"
    settings = (
        f"staleness.bound={bound}",
        f"rollout.instances={instances}",
        f"rollout.max_running={192 // instances}",
        f"rollout.kv_capacity_tokens={16384 // instances}",
        f"run.steps={steps}",
        f"run.name={name}",
        f"run.output_dir={output}",
    )
    command = [str(Path(sys.executable).with_name("staleflow")), "run", *settings, *OFF, *SAME]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (output / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    seconds = rows[-1]["run/seconds"] - rows[0]["run/seconds"]
    return {
        "tokens_per_s": sum(row["train/tokens"] for row in rows[1:]) / seconds,
        "step_s": seconds / (len(rows) - 1),
        "response_len": sum(row["rollout/response_len_mean"] for row in rows) / len(rows),
        "reward_first": rows[0]["rollout/reward_mean"],
        "reward_last": rows[-1]["rollout/reward_mean"],
        "staleness_max": max(row["staleness/max"] for row in rows),
    }


def trl_process(threads: int, steps: int) -> dict[str, float]:
    """TRL in a process of its own with so many threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "staleflow.experiments.whole_step", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_whole_step(options: Options) -> Result:
    """Raises ConfigError where TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "TRL is not installed, and a whole step is compared with it: `make trl` installs it"
        )
    best = best_rounds(steps=3, rounds=1) if options.quick else best_rounds(steps=12, rounds=2)
    reference = max(figures["tokens_per_s"] for name, figures in best.items() if name.startswith("TRL"))
    rows = tuple(
        (
            name,
            f["tokens_per_s"],
            f["tokens_per_s"] / reference,
            f["step_s"],
            f["response_len"],
            f"{f['reward_first']:.2f} to {f['reward_last']:.2f}",
            f.get("staleness_max", 0.0),
        )
        for name, f in best.items()
    )
    findings = tuple(
        Finding(name=f"{name}, of TRL", value=f["tokens_per_s"] / reference, unit="x")
        for name, f in best.items()
        if not name.startswith("TRL")
    )
    return Result(findings=findings, tables=(Table(title="A whole step", columns=COLUMNS, rows=rows),))


def best_rounds(*, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """The fastest round of each system, which take turns."""
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            round_ = {f"TRL, {t} thread{'s' * (t > 1)}": trl_process(t, steps) for t in (1, 2)}
            for bound, instances in product((0, 1), (1, 2)):
                name = f"staleflow, η = {bound}, {instances} instance{'s' * (instances > 1)}"
                round_[name] = staleflow_rate(bound, instances, steps, Path(folder))
            for name, figures in round_.items():
                if name not in best or figures["tokens_per_s"] > best[name]["tokens_per_s"]:
                    best[name] = figures
    return best


WHOLE_STEP = Study(
    name="whole-step",
    question="How fast is a whole training step beside TRL's GRPOTrainer?",
    script=measure_whole_step,
)

if __name__ == "__main__":
    print(json.dumps(trl_rate(load_config([], []), int(sys.argv[1]))))
