"""Recreate the warm start of the built-in task, staleflow/data/builtin/sums, from nothing:

    OMP_NUM_THREADS=1 PYTHONPATH=. .venv/bin/python scripts/make_warm_start.py

Two to four minutes on one core. Seeded and single-threaded, so the same machine and library versions give the
same file; others give one of about the same skill, since rounding differs.

Invariants: training never sees a held-out prompt; prompts are drawn as in the task, but with all numbers of
terms equally often.

Where the head-room of the default run comes from: the model is first taught the task, and then, briefly, from
demonstrations of which half forget every carry (53 + 79 = 122). It ends up adding in both ways and is mostly
wrong, greedily too. Nothing but the reward tells which way is right; reinforcement learning has to find that
out, and greedy accuracy rises as well. What is learned there is a habit, not arithmetic from nothing: the
head-room is engineered, and the curve says that the loop works, no more.
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
    written,
)
from staleflow.data.tokenizers import CHAR_VOCABULARY, CharTokenizer
from staleflow.reward.verifiers import ScoreRequest, exact_match

FOLDER = Path(__file__).resolve().parent.parent / "staleflow/data/builtin/sums"
TOKENIZER = CharTokenizer(ALPHABET)
PAD, STOP = TOKENIZER.pad_token_id, TOKENIZER.stop_token_ids[0]
HELD_OUT = 512
MAX_NEW_TOKENS = 48
"""As in the default run: some room beyond the longest correct response."""


def new_model(seed: int) -> Any:
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
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            torch.nn.init.normal_(parameter, std=0.7)
    return model


def train(
    model: Any, *, steps: int, batch: int, rates: tuple[float, float], careless: float, seed: int
) -> None:
    """Supervised steps; the learning rate goes from the first of `rates` to the second, after 50 of warm-up.

    A share `careless` of the demonstrations forgets every carry.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        rate = rates[0] + (rates[1] - rates[0]) * step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50)
        texts = []
        for _ in range(batch):
            terms = draw_terms(rng, "train", uniform=True)
            forgets = rng.random() < careless
            texts.append((question(terms), careless_solution(terms) if forgets else solution(terms)))
        ids, labels = demonstrations(texts)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d} of {steps}  loss {loss.item():.3f}", flush=True)


def careless_solution(terms: Sequence[int]) -> str:
    """The running sums of somebody who adds digit by digit and forgets every carry."""
    total, sums = terms[0], []
    for term in terms[1:]:
        total = sum((total // unit + term // unit) % 10 * unit for unit in (1, 10, 100))
        sums.append(written(total))
    return "=".join(sums)


def demonstrations(texts: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, shape (batch, longest); prompts and padding carry no loss."""
    rows = [[*TOKENIZER.encode(prompt + response), STOP] for prompt, response in texts]
    ids = torch.full((len(rows), max(map(len, rows))), PAD)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, PROMPT_TOKENS : len(row)] = ids[i, PROMPT_TOKENS : len(row)]
    return ids, labels


@torch.no_grad()
def accuracy(model: Any, *, sampled: bool) -> float:
    """Share of the held-out prompts answered right, one response each."""
    source = SumsSource(TOKENIZER, size=HELD_OUT, split="held_out")
    prompts = [source.prompt(i) for i in range(HELD_OUT)]
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    torch.manual_seed(0)
    ids = torch.tensor([p.tokens for p in prompts])
    model.generation_config = generation_config(max_new_tokens=MAX_NEW_TOKENS, **sampling)
    out = model.generate(ids, attention_mask=torch.ones_like(ids))
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


def generation_config(**settings: Any) -> GenerationConfig:
    """With the ids of padding and stop token set."""
    return GenerationConfig(pad_token_id=PAD, eos_token_id=STOP, **settings)  # type: ignore[no-untyped-call]


def save(model: Any, folder: Path) -> None:
    """The folder as Hugging Face loads it, with staleflow's own vocabulary file beside tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = generation_config()
    model.save_pretrained(folder)
    (folder / CHAR_VOCABULARY).write_text(json.dumps({"alphabet": ALPHABET}) + "\n", encoding="utf-8")
    vocabulary = {"<pad>": PAD, "<stop>": STOP} | {c: TOKENIZER.encode(c)[0] for c in ALPHABET}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<stop>")  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(folder)


def main() -> None:
    """Train, report, save."""
    parser = argparse.ArgumentParser(description="Recreate the warm start of the built-in task.")
    parser.add_argument("--steps", type=int, default=1000, help="supervised steps on correct demonstrations")
    parser.add_argument("--careless-steps", type=int, default=150, help="then, with careless ones among them")
    parser.add_argument("--careless-share", type=float, default=0.5, help="of the demonstrations in those")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(True)
    model = new_model(options.seed)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size} parameters; responses of up to {MAX_RESPONSE_TOKENS} tokens")
    train(
        model,
        steps=options.steps,
        batch=options.batch,
        rates=(3e-3, 3e-4),
        careless=0.0,
        seed=options.seed + 1,
    )
    # The rate stays high to the end: a minimum reached by lowering it is sharp, and the first reinforcement
    # steps would kick the model out of it.
    train(
        model,
        steps=options.careless_steps,
        batch=options.batch,
        rates=(1e-3, 1e-3),
        careless=options.careless_share,
        seed=options.seed + 2,
    )
    model.train(False)
    for sampled in (True, False):
        kind = "sampled" if sampled else "greedy"
        print(f"held-out accuracy, {kind}: {accuracy(model, sampled=sampled):.3f}", flush=True)
    save(model, options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
