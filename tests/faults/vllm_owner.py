"""A process that owns a vLLM engine and waits to be killed: `python vllm_owner.py <model folder> <workers>`.

It decodes a little, and prints one line of JSON: the pid of the host process, and the largest difference of
the log-probs to those of the model in plain transformers.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from staleflow.data.trajectory import Prompt, Trajectory
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.vllm import VllmEngine
from staleflow.training.log_probs import token_log_probs


def main(folder: Path, workers: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    engine = VllmEngine(
        folder,
        sampling=SamplingParams(temperature=0.6, max_model_len=64),
        seed=3,
        kv_capacity_tokens=512,
        max_running=8,
        tensor_parallel=workers,
        log=folder / "engine.log",
    )
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    engine.load_weights(state, 0, "recompute")
    for i in range(4):
        prompt = Prompt(prompt_id=str(i), tokens=tuple(range(1 + i, 8)), text="", answer=None)
        engine.add(
            Trajectory(trajectory_id=f"t{i}", group_id="g", member=i, prompt=prompt, max_new_tokens=12)
        )
    worst = 0.0
    while engine.trajectories():
        for trajectory in engine.step():
            start = trajectory.prompt_len
            ids = torch.tensor([[*trajectory.prompt.tokens, *trajectory.tokens.tolist()]])
            mask = torch.arange(ids.shape[1])[None] >= start
            with torch.no_grad():
                expected, _ = token_log_probs(model, ids, mask, 0.6)
            worst = max(worst, float(np.abs(expected[0, start:].numpy() - trajectory.log_probs).max()))
    print(json.dumps({"host": engine.host_pid, "difference": worst}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
