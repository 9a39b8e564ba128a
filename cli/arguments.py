"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from staleflow.config import Config

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [OVERLAY...] [key.path=value...]",
        help="YAML files, merged from left to right, then single values.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def command_config(arguments: list[str] | None, *, simulated: bool = False) -> Config:
    """The config that the files and overrides of a command line give. Raises ConfigError."""
    from staleflow.config import load_config
    from staleflow.config.layers import split_arguments

    files, overrides = split_arguments(arguments or [])
    return load_config(files, overrides, os.environ, simulated=simulated)
