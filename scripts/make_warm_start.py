"""Recreate the warm start of the built-in task, staleflow/data/builtin/sums, from nothing:

    OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python scripts/make_warm_start.py

One to two minutes on one core. Seeded and single-threaded, so the same machine and library versions give the
same file; others give one of about the same skill, since rounding differs.

Invariants: training never sees a held-out prompt; all demonstrations are correct.

Where the head-room of the default run comes from: supervised training *stops early*. The model has then
found where to look and how to add, and is right about two times in three when decoded greedily, but unsure:
sampled at temperature 1 it is right about one time in three. Reinforcement learning from its own samples
raises both. More supervised steps (`--steps 800`) would take it to nearly 1: the task shows the loop at work,
it is no benchmark of skill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from staleflow.data.sums import (
    ALPHABET,
    MAX_RESPONSE_TOKENS,
    PROMPT_TOKENS,
    SumsSource,
    draw_terms,
    question,
    solution,
)
from staleflow.data.tokenizers import CHAR_VOCABULARY, CharTokenizer
from staleflow.reward.verifiers import ScoreRequest, exact_match

FOLDER = Path(__file__).resolve().parent.parent / "staleflow/data/builtin/sums"
TOKENIZER = CharTokenizer(ALPHABET)
PAD, STOP = TOKENIZER.pad_token_id, TOKENIZER.stop_token_ids[0]
HELD_OUT = 512
MAX_NEW_TOKENS = 48
"""As in the default run: some room beyond the longest correct response."""


def new_model(seed: int) -> LlamaForCausalLM:
    """A decoder of about 150,000 parameters.

    Attention biases and a small RoPE base let a head attend to "so many tokens back" whatever stands there:
    without them, finding the next term takes several times as many steps.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        attention_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=PAD,
        eos_token_id=STOP,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            torch.nn.init.normal_(parameter, std=0.7)
    return model


def train(model: LlamaForCausalLM, *, steps: int, batch: int, peak: float, seed: int) -> None:
    """Supervised steps on correct demonstrations; the learning rate rises for 50 steps and falls to 0."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        rate = peak * min((step + 1) / 50, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = demonstrations([draw_terms(rng, "train", uniform=True) for _ in range(batch)])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d} of {steps}  loss {loss.item():.3f}", flush=True)


def demonstrations(batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, shape (batch, longest); prompts and padding carry no loss."""
    rows = [[*TOKENIZER.encode(question(t) + solution(t)), STOP] for t in batch]
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, PROMPT_TOKENS : len(row)] = ids[i, PROMPT_TOKENS : len(row)]
    return ids, labels


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, *, sampled: bool) -> float:
    """Share of the held-out prompts answered right, one response each."""
    source = SumsSource(TOKENIZER, size=HELD_OUT, split="held_out")
    prompts = [source.prompt(i) for i in range(HELD_OUT)]
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    torch.manual_seed(0)
    ids = torch.tensor([p.tokens for p in prompts])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=GenerationConfig(
            max_new_tokens=MAX_NEW_TOKENS, pad_token_id=PAD, eos_token_id=STOP, **sampling
        ),
    )
    right = 0.0
    for prompt, row in zip(prompts, out.tolist(), strict=True):
        right += exact_match(
            ScoreRequest(
                trajectory_id=prompt.prompt_id,
                prompt=prompt.text,
                response=TOKENIZER.decode(row[PROMPT_TOKENS:]),
                answer=prompt.answer,
                metadata=prompt.metadata,
            )
        )
    return right / HELD_OUT


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """The folder as Hugging Face loads it, with staleflow's own vocabulary file beside tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(pad_token_id=PAD, eos_token_id=STOP)
    model.save_pretrained(folder)
    (folder / CHAR_VOCABULARY).write_text(json.dumps({"alphabet": ALPHABET}) + "\n", encoding="utf-8")
    vocabulary = {"<pad>": PAD, "<stop>": STOP} | {c: TOKENIZER.encode(c)[0] for c in ALPHABET}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<stop>").save_pretrained(
        folder
    )


def main() -> None:
    """Train, report, save."""
    parser = argparse.ArgumentParser(description="Recreate the warm start of the built-in task.")
    parser.add_argument("--steps", type=int, default=580)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    model = new_model(options.seed)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters; responses of up to {MAX_RESPONSE_TOKENS} tokens")
    train(model, steps=options.steps, batch=options.batch, peak=options.learning_rate, seed=options.seed + 1)
    model.train(False)
    for sampled in (True, False):
        kind = "sampled" if sampled else "greedy"
        print(f"held-out accuracy, {kind}: {accuracy(model, sampled=sampled):.3f}", flush=True)
    save(model, options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
