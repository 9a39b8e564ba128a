"""Models as data: the shape of a decoder, and numbers computed from it.

Invariant: every number is computed from the shape, for models from a `config.json` and for the named ones
alike; the totals of the named ones equal the published ones (7,615,616,512, 14,770,033,664,
32,763,876,352 and 30,532,122,624 parameters).

Sources of the shapes: the `config.json` of Qwen/Qwen2.5-7B, -14B, -32B and Qwen/Qwen3-30B-A3B on the Hugging
Face Hub. Weights and KV are bfloat16: 2 bytes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.errors import ConfigError

NUMBER_BYTES = 2
"""Bytes of a weight or of a number in the KV cache: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A decoder like Llama: grouped-query attention and a gated MLP (or such experts) in each layer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert if there are experts."""
    vocab: int
    experts: int = 0
    """Experts of each layer; 0: a dense model."""
    experts_per_token: int = 0
    tied: bool = False
    """The output layer uses the input embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def attention_parameters(self) -> int:
        """Attention parameters of one layer, norms included."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * queries + 2 * keys)
        bias = queries + 2 * keys if self.qkv_bias else 0
        return matrices + bias + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP, or of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, and of the output layer if it is separate."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.layers * self.experts * self.mlp_parameters

    @property
    def shared_parameters(self) -> int:
        """Parameters that every decode step reads: all but the experts and the input embedding, of which a
        step reads only its tokens' rows."""
        layer = self.attention_parameters + (self.hidden * self.experts or self.mlp_parameters)
        return self.layers * layer + self.hidden + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All."""
        own_input = 0 if self.tied else self.vocab * self.hidden
        return self.shared_parameters + own_input + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, without the input embedding, which is a lookup."""
        return self.shared_parameters + self.layers * self.experts_per_token * self.mlp_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters * NUMBER_BYTES

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in the KV cache: a key and a value in each layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * NUMBER_BYTES

    @property
    def attention_flops(self) -> int:
        """FLOPs of one token for each position that it attends to: score and weighted sum, a multiplication
        and an addition each."""
        return 4 * self.layers * self.heads * self.head_dim

    def experts_read(self, running: int) -> float:
        """Share of a layer's experts that a step of `running` trajectories reads, each choosing at random.

        1 - (1 - k / E)^n, 1 for a dense model. Real routers are less even, so this overestimates slightly.
        """
        if not self.experts:
            return 1.0
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** running


def _qwen25(name: str, layers: int, hidden: int, heads: int, kv_heads: int, width: int) -> ModelDescription:
    return ModelDescription(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=width,
        vocab=152064,
        qkv_bias=True,
    )


MODELS = {
    model.name: model
    for model in (
        _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944),
        _qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824),
        _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648),
        ModelDescription(
            name="qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=768,
            vocab=151936,
            experts=128,
            experts_per_token=8,
            qk_norm=True,
        ),
    )
}
"""By name."""


def find_model(name: str) -> ModelDescription:
    """A model by its name or the folder of its `config.json`. Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return read_model(path / "config.json")
    close = difflib.get_close_matches(name.lower(), MODELS, n=1)
    raise ConfigError(
        f"simulation.model is {name!r}, which is neither a folder nor a known model: use one of "
        f"{', '.join(MODELS)}, or a folder with a Hugging Face config.json"
        f"{f'; did you mean {close[0]}?' if close else ''}"
    )


_OTHER_KINDS = (
    "kv_lora_rank",
    "mlp_only_layers",
    "first_k_dense_replace",
    "n_routed_experts",
    "n_shared_experts",
)
"""Keys of a `config.json` for other shapes: latent attention, layers of different kinds, shared experts."""


def read_model(path: Path) -> ModelDescription:
    """The model of a `config.json`: Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and similar ones.

    Raises ConfigError for other shapes, and for a file that cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as the config of a model: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not the config of a model: it is not a JSON object")
    other = [key for key in _OTHER_KINDS if values.get(key)]
    if values.get("decoder_sparse_step", 1) != 1:
        other.append("decoder_sparse_step")
    if other:
        raise ConfigError(
            f"{path} describes a model whose shape differs from Llama's ({', '.join(other)} is set)"
        )
    kind = str(values.get("model_type", ""))
    experts = _number(path, values, "num_experts", "num_local_experts", default=0, least=0)
    width = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    hidden = _number(path, values, "hidden_size")
    heads = _number(path, values, "num_attention_heads")
    return ModelDescription(
        name=path.parent.name or str(path),
        layers=_number(path, values, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(path, values, "num_key_value_heads", default=heads),
        head_dim=_number(path, values, "head_dim", default=hidden // heads),
        intermediate=_number(path, values, *width),
        vocab=_number(path, values, "vocab_size"),
        experts=experts,
        experts_per_token=_number(path, values, "num_experts_per_tok") if experts else 0,
        tied=values.get("tie_word_embeddings") is True,
        qkv_bias=kind == "qwen2" or values.get("attention_bias") is True,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
    )


def _number(
    path: Path, values: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1
) -> int:
    """The value of the first of these keys that is present and not null."""
    for key in keys:
        value = values.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{path}: {key} is {value!r}, not a whole number of at least {least}")
            return value
    if default is None:
        raise ConfigError(f"{path} has no {' or '.join(keys)}, so the shape of the model is unknown")
    return default
