"""A tiny model folder, a config around it, and verifiers that need no skill, for the runtime's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.config import load_config
from staleflow.config.schema import Config
from staleflow.data.sums import ALPHABET
from staleflow.protocol.records import Start
from staleflow.reward.verifiers import ScoreRequest
from staleflow.runtime.assembly import build_inline_loop, build_monitor, read_data
from staleflow.runtime.clock import VirtualClock
from staleflow.runtime.loop import RunLoop
from staleflow.runtime.start import RunPaths, StartPoint, first_start
from staleflow.telemetry.monitor import RunMonitor


def make_model_folder(folder: Path) -> Path:
    """A random Llama of a few thousand parameters over the characters of the sums task."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2 + len(ALPHABET),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "char_vocab.json").write_text(json.dumps({"alphabet": ALPHABET}))
    return folder


def any_third(request: ScoreRequest) -> float:
    """1 for about a third of all responses, whatever they say."""
    return float(sum(map(ord, request.response)) % 3 == 0)


def always_one(request: ScoreRequest) -> float:
    """The same reward for everything."""
    return 1.0


def toy_config(model: Path, folder: Path, *overrides: str) -> Config:
    """Small batches, the fake engine, everything in one process."""
    return load_config(
        [],
        [
            f"model.source={model}",
            f"run.output_dir={folder}",
            "run.name=toy",
            "run.steps=6",
            "cluster.runtime=inline",
            "data.size=64",
            "data.batch_size=3",
            "data.group_size=3",
            "rollout.engine=fake",
            "rollout.fake.lengths.kind=lognormal",
            "rollout.fake.lengths.mean=6",
            "rollout.fake.lengths.max=24",
            "rollout.max_new_tokens=24",
            "rollout.max_running=8",
            "reward.verifier=toy.any_third",
            "training.learning_rate=0.01",
            "training.warmup_steps=0",
            "evaluation.every=0",
            "telemetry.console=off",
            "telemetry.wandb.mode=disabled",
            *overrides,
        ],
        {},
    )


class ToyRun:
    """One attempt in this process, with everything in reach."""

    def __init__(
        self, config: Config, folder: Path, *, start: StartPoint | None = None, **parts: Any
    ) -> None:
        self.config = config
        self.ledger = folder / "ledger.jsonl"
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        clock = VirtualClock()
        self.journal = folder / "journal.jsonl"
        paths = RunPaths(
            name="toy",
            ledger=self.ledger,
            checkpoints=self.checkpoints,
            logs=folder,
            journal=self.journal,
        )
        self.monitor: RunMonitor = build_monitor(config, paths, clock)
        self.loop: RunLoop = build_inline_loop(
            config,
            read_data(config),
            start or first_start(opening(config)),
            paths,
            monitor=self.monitor,
            clock=clock,
            **parts,
        )

    def run(self) -> str:
        """To the end."""
        return self.loop.run()


def opening(config: Config) -> Start:
    """The first record of a ledger."""
    return Start(
        bound=config.staleness.bound,
        batch_size=config.data.batch_size,
        group_size=config.data.group_size,
        last_batch=config.data.last_batch,
        spare_limit=config.redundancy.groups,
    )
