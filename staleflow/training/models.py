"""Find and load a causal language model: a local Hugging Face folder, or a model shipped with the package.

Invariants: no network access; importing this module imports neither torch nor transformers.
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
            "download it again."
        )
    return folder


def _missing_shards(folder: Path) -> list[str]:
    """Files named in the index of sharded weights that do not exist. Raises ConfigError."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return []
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"The model's {path} cannot be read ({error}); download it again.") from error
    return sorted(name for name in named if not (folder / name).is_file())


def context_length(folder: Path) -> int | None:
    """Context length of the model in `folder`, in tokens; None: its config has none. Raises ConfigError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        limit = config.get("max_position_embeddings") or config.get("n_positions")
        return None if limit is None else int(limit)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The model's {path} cannot be read ({error}); give a Hugging Face folder."
        ) from error


def set_attention(model: PreTrainedModel, name: str | None) -> None:
    """Make the model use transformers' attention implementation `name`. Raises ConfigError."""
    if name is None:
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"training.attention {name!r} cannot be used here ({reason}): try sdpa") from error


def load_model(source: str, dtype: str = "float32") -> PreTrainedModel:
    """Load the model on the CPU in evaluation mode (no dropout), so that log-probs agree with the rollout's.

    Raises ConfigError: folder missing or unusable, unknown dtype, weights that do not match the config.
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
        # transformers passes on any error of its parsers; all mean that the folder has no usable model.
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"The model folder {source!r} cannot be loaded: {reason}.") from error
    model.train(False)
    return model
