"""vLLM's processes when their owner is killed, or does not wait for them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.errors import EngineError
from staleflow.rollout.engine import SamplingParams
from staleflow.rollout.vllm import VllmEngine

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(400),
]

OWNER = Path(__file__).with_name("vllm_owner.py")
GONE_WITHIN_S = 30.0
"""A killed process of a gigabyte takes a while to be cleared away on a busy machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with untied embeddings, grouped queries, and heads that vLLM's CPU kernels know."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < deadline:
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.pid)
        if not alive:
            return True
        time.sleep(0.2)
    return False


@pytest.fixture
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(OWNER), str(folder), "1"], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_no_process_outlives_an_owner_that_was_killed(owner: subprocess.Popen[str]) -> None:
    """F37: SIGKILL, which no handler sees. Log-probs of this second model agree too (F13)."""
    assert owner.stdout is not None
    said = json.loads(owner.stdout.readline())
    assert said["difference"] < 1e-4
    assert psutil.pid_exists(said["host"])
    os.kill(owner.pid, signal.SIGKILL)
    assert group_is_gone(said["host"])


def test_a_start_that_takes_too_long_is_an_error_and_leaves_no_process(folder: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match="did not start within 0 s"):
        VllmEngine(
            folder,
            sampling=SamplingParams(max_model_len=64),
            seed=0,
            kv_capacity_tokens=512,
            max_running=4,
            start_timeout_s=0.2,
        )
    assert set(psutil.Process().children(recursive=True)) <= before
