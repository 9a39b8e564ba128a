"""A model folder and data of the user's own, as they come from elsewhere, through a whole run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy import ToyRun, toy_config

from staleflow.audit import audit_ledger
from staleflow.data.environment import ScriptedTurns
from staleflow.data.trajectory import TrainBatch, token_hash
from staleflow.protocol.records import Trained
from staleflow.reward.verifiers import ScoreRequest
from staleflow.rollout.scheduler import Generation
from staleflow.rollout.torch import TorchEngine
from staleflow.runtime.assembly import build_engine, read_data
from staleflow.storage.ledger import read_ledger

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|text_end|>", "<|system|>", "<|user|>", "<|assistant|>"]
GIVEN = [5, 6]
"""What the environment puts between two turns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 in several weight files; BPE with merges, a chat template, and a list of end tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("1", "2"), ("+", "1")]
    words = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = TEMPLATE
    target = tmp_path_factory.mktemp("own") / "model"
    fast.save_pretrained(target)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [0, 1]
    model.save_pretrained(target, max_shard_size="8KB")
    assert len(list(target.glob("model-*.safetensors"))) > 1
    return target


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [{"question": f"abc {n}+12?", "answer": f"{n}+12=<<{n + 12}>>\n#### {n + 12}"} for n in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def by_length(request: ScoreRequest) -> float:
    """Differs within a group, and needs the answer to have been cut."""
    return float(len(request.response) % 2 == 0 and str(request.answer).isdigit())


def test_ids_that_do_not_survive_the_tokenizer_are_trained_on_as_sampled_over_two_turns(
    folder: Path, questions: Path, tmp_path: Path
) -> None:
    """F14, with the torch engine: every token that it draws is noted where it is drawn."""
    config = toy_config(
        folder,
        tmp_path,
        "rollout.engine=torch",
        "rollout.max_new_tokens=16",
        "run.steps=2",
        "data.source=jsonl",
        f"data.path={questions}",
        "data.size=null",
        "data.system_prompt=ab",
        "reward.verifier=test_own_model.by_length",
        "training.dynamic_sampling=false",
    )
    drawn: dict[tuple[str, int], int] = {}

    class Noting(TorchEngine):
        def _decode(self, running: Sequence[Generation]) -> Iterable[tuple[Generation, int, float]]:
            step = list(super()._decode(running))
            drawn.update({(g.trajectory_id, g.position): token for g, token, _ in step})
            return step

    tokenizer = read_data(config).tokenizer

    def make(instance: str, incarnation: int) -> Any:
        engine: Any = build_engine(config, tokenizer, spend=lambda seconds: None)
        engine.__class__ = Noting
        return engine

    run = ToyRun(config, tmp_path, make_engine=make, environment=ScriptedTurns([GIVEN]))
    batches: list[TrainBatch] = []
    backend: Any = run.loop._backend
    original = backend.train
    backend.train = lambda batch, **more: (batches.append(batch), original(batch, **more))
    assert run.run() == "completed"
    assert audit_ledger(run.ledger).ok

    hashes = {
        t.id: t.hash
        for _, _, record in read_ledger(run.ledger)
        if isinstance(record, Trained)
        for t in record.trajectories
    }
    two_turns = changed = 0
    for trajectory in (s.trajectory for batch in batches for group in batch.groups for s in group):
        prompt = trajectory.prompt
        assert prompt.text == f"<|system|>ab<|end|><|user|>abc {prompt.prompt_id}+12?<|end|><|assistant|>"
        assert prompt.tokens[:4] == (2, tokenizer.encode("ab")[0], 0, 3)
        expected: list[int] = []
        for segment in trajectory.segments:
            begin = len(expected)
            expected += (
                [drawn[trajectory.trajectory_id, begin + i] for i in range(len(segment.tokens))]
                if segment.generated
                else GIVEN[: len(segment.tokens)]
            )
        assert trajectory.tokens.tolist() == expected
        assert hashes.pop(trajectory.trajectory_id) == token_hash(np.array(expected, dtype=np.int32))
        two_turns += len(trajectory.segments) > 1
        changed += tokenizer.encode(tokenizer.decode(expected)) != expected
    assert not hashes
    assert changed > 0
    assert two_turns > 0


def test_every_end_token_that_the_folder_names_ends_a_response(folder: Path, tmp_path: Path) -> None:
    config = toy_config(folder, tmp_path, "data.source=reasoning_gym:chain_sum", "data.system_prompt=ab")
    data = read_data(config)
    assert data.tokenizer.stop_token_ids == (0, 1)
    assert data.train.prompt(0).tokens[0] == 2
