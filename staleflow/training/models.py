"""Find and load a causal language model: a local Hugging Face folder, or one shipped with the package.

Invariants: no network is touched; importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUILTIN = "builtin:"
DTYPES = ("float32", "bfloat16", "float16")


def builtin_models() -> dict[str, Path]:
    """Name -> folder of every model shipped inside the package."""
    root = Path(str(files("staleflow.data"))) / "builtin"
    return {folder.parent.name: folder.parent for folder in sorted(root.glob("*/config.json"))}


def model_folder(source: str) -> Path:
    """The folder that `source` names, with a config.json and weights in it. Raises ConfigError."""
    if source.startswith(BUILTIN):
        shipped = builtin_models()
        name = source.removeprefix(BUILTIN)
        if name not in shipped:
            raise ConfigError(
                f"There is no built-in model {name!r}; use one of {', '.join(shipped) or '(none)'}."
            )
        return shipped[name]
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"The model folder {source!r} does not exist; give a local Hugging Face folder.")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"The model folder {source!r} has no config.json; give a local Hugging Face folder."
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"The model folder {source!r} has no *.safetensors file; save its weights there first."
        )
    missing = _missing_shards(folder)
    if missing:
        raise ConfigError(
            f"The model folder {source!r} lacks {len(missing)} of its weight files, such as {missing[0]}: "
            "fetch it again."
        )
    return folder


def _missing_shards(folder: Path) -> list[str]:
    """Files that the index of sharded weights names and that are not there. Raises ConfigError."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return []
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"The model's {path} cannot be read ({error}); fetch it again.") from error
    return sorted(name for name in named if not (folder / name).is_file())


def context_length(folder: Path) -> int | None:
    """Most tokens that the model in `folder` reads; None: its config names no limit. Raises ConfigError."""
    path = folder / "config.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        own = about.get("max_position_embeddings") or about.get("n_positions")
        return None if own is None else int(own)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The model's {path} cannot be read ({error}); give a Hugging Face folder."
        ) from error


def set_attention(model: PreTrainedModel, name: str | None) -> None:
    """Let the model use the attention that transformers calls `name`. Raises ConfigError when it cannot."""
    if name is None:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"training.attention {name!r} cannot be used here ({reason}): try sdpa") from error


def load_model(source: str, dtype: str = "float32") -> PreTrainedModel:
    """Load the model on the CPU, in evaluation mode: dropout off, so that log-probs agree with the rollout's.

    Raises ConfigError: folder missing or unusable, unknown dtype, weights that do not fit the config.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"The model dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}.")
    folder = model_folder(source)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    except Exception as error:
        # transformers raises whatever its parsers raise; all of it means that this folder is no usable model.
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"The model folder {source!r} cannot be loaded: {reason}.") from error
    model.train(False)
    return model
