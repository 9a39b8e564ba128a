"""Decode throughput of the torch engine, beside `transformers.generate` on the same model and prompts.

Both sample at temperature 1 and return the log-prob of each token; every response takes the same number of
tokens, the case that suits `generate` best. `mixed` has responses of 1/4 to 7/4 of that, where rows leave
as they finish while `generate` decodes its whole batch to the longest; only wanted tokens are counted.
Rates are per second of processor time of the one thread, best of the rounds: on a shared machine the wall
clock mostly measures the neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.torch import TorchEngine

VOCAB, PROMPT_LEN, POSITIONS = 16, 16, 1024


def tiny_llama(layers: int = 3, hidden: int = 64) -> Any:
    """A random model of the size that the built-in task trains."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=POSITIONS,
        )
    ).eval()


def run_engine(model: Any, prompts: np.ndarray, budgets: list[int]) -> int:
    """Generate with the torch engine; returns the tokens generated."""
    engine = TorchEngine(
        model,
        sampling=SamplingParams(max_model_len=POSITIONS),
        seed=0,
        kv_capacity_tokens=len(prompts) * POSITIONS,
        max_running=len(prompts),
    )
    for i, (tokens, budget) in enumerate(zip(prompts.tolist(), budgets, strict=True)):
        prompt = Prompt(prompt_id=str(i), tokens=tuple(tokens), text="", answer=None)
        engine.add(
            Trajectory(
                trajectory_id=f"e0-p{i}-a0-m0",
                group_id=f"e0-p{i}-a0",
                member=0,
                prompt=prompt,
                max_new_tokens=budget,
            )
        )
    while engine.load().running + engine.load().waiting:
        engine.step()
    return engine.load().generated_tokens


def run_generate(model: Any, prompts: np.ndarray, budgets: list[int]) -> int:
    """Generate with transformers; returns the tokens that were wanted."""
    inputs = torch.from_numpy(prompts)
    with torch.inference_mode():
        result = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            top_k=0,
            min_new_tokens=max(budgets),
            max_new_tokens=max(budgets),
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)
    return sum(budgets)


def best_rates(runs: Sequence[Callable[[], int]], rounds: int) -> list[float]:
    """Best rate of each, after one round to warm up; the runs take turns, so that all see the same load."""
    best = [0.0] * len(runs)
    for round_ in range(rounds + 1):
        for i, run in enumerate(runs):
            started = time.process_time()
            rate = run() / (time.process_time() - started)
            best[i] = max(best[i], rate) if round_ else 0.0
    return best


def measure(batches: Sequence[int], tokens: int, rounds: int) -> Sequence[tuple[str | float, ...]]:
    """(sequences, lengths, tokens per CPU second of the engine, of `generate`, their ratio)."""
    torch.set_num_threads(1)
    model, rows = tiny_llama(), []
    for batch in batches:
        prompts = np.random.default_rng(0).integers(0, VOCAB, (batch, PROMPT_LEN))
        equal = [tokens] * batch
        mixed = np.linspace(tokens // 4, tokens * 7 // 4, batch).astype(int).tolist()
        for name, budgets in (("equal", equal), ("mixed", mixed))[: 2 if batch > 1 else 1]:
            runs = [partial(run, model, prompts, budgets) for run in (run_engine, run_generate)]
            ours, theirs = best_rates(runs, rounds)
            rows.append((batch, name, ours, theirs, ours / theirs))
    return rows
