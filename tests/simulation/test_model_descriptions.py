"""Models and GPUs as data: their totals are the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from staleflow.errors import ConfigError, UserError
from staleflow.simulation.gpus import find_gpu
from staleflow.simulation.models import MODELS, find_model, read_model

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def written(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in {**LLAMA_3_8B, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_named_model_has_as_many_parameters_as_its_makers_say(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_a_mixture_of_experts_has_fewer_active_parameters_by_hand() -> None:
    """Its card says 3.3 billion, the input embedding of 311,164,928 included."""
    model = MODELS["qwen3-30b-a3b"]
    expert = 3 * 2048 * 768
    assert model.parameters - model.active_parameters == 48 * 120 * expert + 151936 * 2048
    assert model.active_parameters + 151936 * 2048 == pytest.approx(3.35e9, rel=0.01)


def test_kv_of_a_token_by_hand() -> None:
    """A key and a value of 48 layers x 8 heads x 128 numbers of 2 bytes."""
    assert MODELS["qwen2.5-14b"].kv_bytes == 196_608
    assert MODELS["qwen2.5-14b"].attention_flops == 4 * 48 * 40 * 128


def test_experts_read_by_hand() -> None:
    model = MODELS["qwen3-30b-a3b"]
    assert model.experts_read(1) == pytest.approx(1 / 16)
    assert model.experts_read(2) == pytest.approx(1 - (15 / 16) ** 2)
    assert model.experts_read(1000) == pytest.approx(1.0)
    assert MODELS["qwen2.5-7b"].experts_read(1) == 1.0


def test_a_model_is_read_from_its_config_json(tmp_path: Path) -> None:
    """Llama-3-8B: 8,030,261,248 parameters, as published."""
    model = find_model(str(written(tmp_path)))
    assert (model.parameters, model.kv_bytes, model.head_dim) == (8_030_261_248, 2 * 32 * 8 * 128 * 2, 128)


def test_a_tied_model_has_one_embedding(tmp_path: Path) -> None:
    tied = read_model(written(tmp_path, tie_word_embeddings=True) / "config.json")
    assert tied.parameters == 8_030_261_248 - 128256 * 4096
    assert tied.active_parameters == tied.parameters


def test_a_mixture_is_read_from_its_config_json(tmp_path: Path) -> None:
    """Mixtral-8x7B: 46,702,792,704 parameters, as published."""
    folder = written(tmp_path, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
    assert read_model(folder / "config.json").parameters == 46_702_792_704


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 512}, "shape differs from Llama's (kv_lora_rank is set)"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number of at least 1"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
    ],
)
def test_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model(written(tmp_path, **changes) / "config.json")
    assert said in str(caught.value)


def test_a_mistyped_model_or_gpu_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen2\.5-14b\?"):
        find_model("Qwen2.5-14")
    with pytest.raises(UserError, match="unknown GPU 'B200': use one of H20, H100, H200, A100"):
        find_gpu("B200")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as the config of a model"):
        find_model(str(tmp_path))
