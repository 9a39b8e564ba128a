"""What `gpu_check.py` checks: functions of (model folder, device) that return figures, or raise.

Invariant: each builds what it needs from a config, as a run does, and measures before it says yes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEQUENCES, NEW_TOKENS = 32, 64
VOCABULARY = 64
"""More than the task's characters, so that padding to a device's favourite sizes is not what is tested."""

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""What vLLM computes in: on a GPU what its fastest kernels take."""
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (0.02, 0.3)}
"""Mean and largest difference of log-probs (nats) between two programs' kernels."""

Figures = Mapping[str, Any]


def make_model(folder: Path, device: str) -> Figures:
    """A random Llama of some three million parameters over the characters of the built-in task."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from staleflow.data.sums import ALPHABET

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU; --cpu runs the same checks without one")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.08,  # logits far enough apart for a mistake to show in log-probs
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    (folder / "char_vocab.json").write_text(json.dumps({"alphabet": ALPHABET}))
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M",
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def torch_engine(folder: Path, device: str) -> Figures:
    """The embedded engine, whose log-probs must be those of a full forward pass."""
    from staleflow.rollout.torch.engine import TorchEngine

    model = _model(folder, device, "float32")
    engine = TorchEngine(model, sampling=_sampling(0.8), seed=0, kv_capacity_tokens=8192, max_running=64)
    finished, seconds = _generated(engine, _prompts())
    return _agreement(model, finished, 0.8) | _speed(finished, seconds)


def vllm_engine(folder: Path, device: str) -> Figures:
    """vLLM: log-probs at a temperature, an interruption, and weights exchanged under running trajectories."""
    import numpy as np

    engine = _vllm(folder, device)
    try:
        model = _model(folder, device, DTYPES[device])
        tensors = {name: t.detach().float().cpu().numpy() for name, t in model.state_dict().items()}
        engine.load_weights(tensors, 0, "recompute")
        finished, seconds = _generated(engine, _prompts())
        figures = _agreement(model, finished, 0.8) | _speed(finished, seconds)

        for trajectory in _prompts("again"):
            engine.add(trajectory)
        for _ in range(8):
            engine.step()
        names = list(engine.trajectories())[:4]
        for trajectory in engine.interrupt(names):
            engine.add(trajectory)
        changed = {name: np.ascontiguousarray(tensor * 1.05) for name, tensor in tensors.items()}
        began = time.monotonic()
        engine.load_weights(changed, 1, "recompute")
        swap_s = time.monotonic() - began
        finished = _drained(engine, SEQUENCES)
        crossed = sum(set(t.versions.tolist()) == {0, 1} for t in finished)
        if not crossed:
            raise AssertionError("no trajectory has tokens of both weight versions")
        _load(model, changed)
        figures |= {"swap": f"{1000 * swap_s:.0f} ms", "crossed": crossed}
        after = [t for t in finished if t.versions.tolist()[-1] == 1]
        return figures | {"after swap": _agreement(model, after, 0.8, version=1)["log-prob off by"]}
    finally:
        engine.close()


def deepspeed_trainer(folder: Path, device: str) -> Figures:
    """Two steps with each ZeRO stage: loss and weights must be what the torch trainer makes on the CPU."""
    start = _model(folder, "cpu", "float32").state_dict()
    expected_loss, expected = _trained(_config(folder, "training.trainer=torch"))
    figures: dict[str, Any] = {"loss": f"{expected_loss:.4f}"}
    for stage in (0, 2, 3):
        began = time.monotonic()
        loss, weights = _trained(
            _config(folder, "training.trainer=deepspeed", f"training.deepspeed.zero_stage={stage}")
        )
        off = _distance(weights, expected) / _distance(expected, {n: t.numpy() for n, t in start.items()})
        if abs(loss - expected_loss) > 1e-3 or off > 0.02:
            raise AssertionError(f"ZeRO-{stage}: loss {loss:.5f}, update off by {off:.2%}")
        figures[f"ZeRO-{stage}"] = f"update off by {off:.1%}, {time.monotonic() - began:.0f} s"
    return figures


def weight_transfer(folder: Path, device: str) -> Figures:
    """A gigabyte from the device into the parameter server and back onto the device."""
    import numpy as np
    import torch

    from staleflow.servers.parameter_server import ParameterServer

    size = 1 << (28 if device == "cuda" else 24)
    pieces = 16
    source = {f"w{i}": torch.randn(size // pieces, device=device) for i in range(pieces)}
    server = ParameterServer("shared_memory", run_name=f"gpu-check-{os.getpid()}")
    try:
        publisher, subscriber = server.handle.publisher(), server.handle.subscriber()
        best = {"push": 1e9, "pull": 1e9}
        for version in range(3):
            began = time.monotonic()
            publisher.push(version, {name: tensor.cpu().numpy() for name, tensor in source.items()})
            pushed = time.monotonic()
            with subscriber.lease() as lease:
                there = {name: torch.from_numpy(np.array(t)).to(device) for name, t in lease.tensors.items()}
            if device == "cuda":
                torch.cuda.synchronize()
            best["push"] = min(best["push"], pushed - began)
            best["pull"] = min(best["pull"], time.monotonic() - pushed)
        if not all(torch.equal(there[name], tensor) for name, tensor in source.items()):
            raise AssertionError("what was pulled is not what was pushed")
        publisher.close()
    finally:
        server.close()
    gigabytes = size * 4 / 1e9
    return {
        "size": f"{gigabytes:.2f} GB",
        **{name: f"{gigabytes / seconds:.1f} GB/s" for name, seconds in best.items()},
        "NIXL": "there" if importlib.util.find_spec("nixl") else "not installed",
    }


def short_run(folder: Path, device: str) -> Figures:
    """Five steps: vLLM, DeepSpeed and the reward processes as Ray actors sharing the device."""
    from staleflow.audit import audit_ledger
    from staleflow.runtime.launch import launch

    share = 0.25
    placement = [
        f"model.dtype={DTYPES[device]}",
        f"cluster.placement.rollout_gpus={share}",
        f"cluster.placement.training_gpus={share}",
        f"rollout.vllm.gpu_memory_utilization={share}",
    ]
    config = _config(
        folder,
        "rollout.engine=vllm",
        "training.trainer=deepspeed",
        "training.deepspeed.zero_stage=2",
        "run.steps=5",
        f"run.output_dir={folder.parent}",
        "run.name=short-run",
        "cluster.runtime=ray",
        "cluster.start_timeout_s=170",
        *(placement if device == "cuda" else ()),
    )
    began = time.monotonic()
    code = launch(config, resume=False, clean=True)
    seconds = time.monotonic() - began
    run = folder.parent / "short-run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    audit = audit_ledger(run)
    if code != 0 or len(steps) != 5 or not audit.ok:
        raise AssertionError(f"exit code {code}, {len(steps)} steps, audit: {audit.text().splitlines()[-1]}")
    if not all(row["train/grad_norm"] > 0 for row in steps):
        raise AssertionError("a step had no gradient")
    fresh = steps[0]["train/logprob_abs_diff"]  # of version 0 on both sides
    if fresh > TOLERANCES[config.model.dtype][0]:
        raise AssertionError(f"trainer and engine differ by {fresh:.1e} in the log-probs of the same weights")
    return {
        "steps": len(steps),
        "wall": f"{seconds:.0f} s",
        "staleness": max(row["staleness/max"] for row in steps),
        "log-probs off by": f"{fresh:.0e} before anything lags",
    }


# ---------------------------------------------------------------------- what the checks share


def parity(request: Any) -> float:
    """The verifier of the short run: 1 for about half of all responses, whatever they say."""
    return float(sum(map(ord, request.response)) % 2)


def _config(folder: Path, *overrides: str) -> Any:
    from staleflow.config import load_config

    return load_config(
        [],
        [
            f"model.source={folder}",
            "data.batch_size=4",
            "data.group_size=4",
            "data.size=256",
            "rollout.instances=1",
            "rollout.max_new_tokens=32",
            "rollout.max_model_len=256",
            "rollout.kv_capacity_tokens=8192",
            "rollout.vllm.enforce_eager=true",  # graphs take a minute to make
            "reward.verifier=gpu_check_parts.parity",
            "training.dynamic_sampling=false",
            "training.warmup_steps=0",
            "training.learning_rate=0.001",
            "evaluation.every=0",
            "telemetry.wandb.mode=disabled",
            "telemetry.console=plain",
            *overrides,
        ],
        {},
    )


def _model(folder: Path, device: str, dtype: str) -> Any:
    from staleflow.training.models import load_model

    return load_model(str(folder), dtype).to(device)  # type: ignore[arg-type]


def _load(model: Any, tensors: Mapping[str, Any]) -> None:
    import torch

    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})


def _sampling(temperature: float) -> Any:
    from staleflow.rollout.engine import SamplingParams

    return SamplingParams(temperature=temperature, max_model_len=256)


def _vllm(folder: Path, device: str) -> Any:
    from staleflow.runtime.assembly import build_engine, build_tokenizer

    gpu = ("rollout.vllm.gpu_memory_utilization=0.3", f"model.dtype={DTYPES[device]}")
    config = _config(
        folder,
        "rollout.engine=vllm",
        "rollout.temperature=0.8",
        *(gpu if device == "cuda" else ()),
    )
    return build_engine(config, build_tokenizer(config), spend=time.sleep, endless=True)


def _prompts(name: str = "first") -> list[Any]:
    from staleflow.data.trajectory import Prompt, Trajectory

    return [
        Trajectory(
            trajectory_id=f"{name}-{i}",
            group_id=name,
            member=i,
            prompt=Prompt(
                prompt_id=str(i), tokens=tuple(2 + (i + j) % 12 for j in range(3 + i)), text="", answer=""
            ),
            max_new_tokens=NEW_TOKENS,
        )
        for i in range(SEQUENCES)
    ]


def _generated(engine: Any, trajectories: list[Any]) -> tuple[list[Any], float]:
    began = time.monotonic()
    for trajectory in trajectories:
        engine.add(trajectory)
    return _drained(engine, len(trajectories)), time.monotonic() - began


def _drained(engine: Any, count: int) -> list[Any]:
    finished: list[Any] = []
    while len(finished) < count:
        finished.extend(engine.step())
    return finished


def _agreement(
    model: Any, trajectories: list[Any], temperature: float, *, version: int | None = None
) -> dict[str, Any]:
    """Difference of log-probs to a full forward pass; of the tokens of `version`, or of all."""
    import numpy as np
    import torch

    differences = []
    for t in trajectories:
        ids = [*t.prompt.tokens, *t.tokens.tolist()]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
        log_probs = torch.log_softmax(logits[t.prompt_len - 1 : -1] / temperature, dim=-1)
        chosen = log_probs.gather(-1, torch.tensor(ids[t.prompt_len :], device=model.device)[:, None])[:, 0]
        off = np.abs(chosen.cpu().numpy() - t.log_probs)
        if version is not None:
            off = off[t.versions == version]
        differences.append(off)
    off = np.concatenate(differences)
    mean, most = TOLERANCES[str(model.dtype).removeprefix("torch.")]
    said = f"{off.mean():.0e} (at most {off.max():.0e})"
    if off.mean() > mean or off.max() > most:
        raise AssertionError(f"log-probs are off by {said}; allowed is {mean:.0e} (at most {most:.0e})")
    return {"log-prob off by": said}


def _speed(trajectories: list[Any], seconds: float) -> dict[str, Any]:
    tokens = sum(t.response_len for t in trajectories)
    return {"tokens/s": f"{tokens / seconds:,.0f} at {SEQUENCES}"}


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Of two sets of weights. Adam may take any small gradient either way, so single ones say nothing."""
    return math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))


def _trained(config: Any) -> tuple[float, dict[str, Any]]:
    """Loss of the second of two steps on made-up batches, and the weights after it."""
    import numpy as np

    from staleflow.runtime.assembly import build_trainer
    from staleflow.runtime.launch import opening_record
    from staleflow.runtime.start import first_start

    trainer = build_trainer(config, first_start(opening_record(config)))
    try:
        for step in range(2):
            loss = trainer.train(_batch(step)).metrics["train/loss"]
        return float(loss), {name: np.array(tensor) for name, tensor in trainer.weights().items()}
    finally:
        trainer.close()


def _batch(step: int) -> Any:
    """Four groups of four made-up responses of different lengths and rewards."""
    import numpy as np

    from staleflow.data.trajectory import FinishReason, Reward, ScoredTrajectory, Segment, TrainBatch

    numbers = np.random.default_rng(step)
    groups = []
    for group in range(4):
        members = []
        for member in range(4):
            length = int(numbers.integers(4, 24))
            segment = Segment(
                generated=True,
                tokens=numbers.integers(2, 14, length).astype(np.int32),
                log_probs=np.full(length, -np.log(VOCABULARY), dtype=np.float32),
                versions=np.full(length, step, dtype=np.int32),
            )
            empty = _prompts(f"b{step}-{group}")[member]
            done = empty.extended(segment).finished(FinishReason.STOP)
            members.append(ScoredTrajectory(trajectory=done, reward=Reward(raw=float(member % 2))))
        groups.append(tuple(members))
    return TrainBatch(step=step, groups=tuple(groups))
