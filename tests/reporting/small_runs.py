"""Runs of a few rows, for figures that are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from staleflow.reporting.load import RunData, load_run

STEPS = (
    {
        "kind": "train",
        "train/step": 0,
        "run/seconds": 10.0,
        "timing_s/wait_for_batch": 6.0,
        "timing_s/update": 1.0,
    },
    {
        "kind": "train",
        "train/step": 1,
        "run/seconds": 20.0,
        "timing_s/wait_for_batch": 2.0,
        "timing_s/update": 3.0,
        "tokens/generated": 100,
        "tokens/trained": 80,
        "tokens/filtered": 10,
        "tokens/in_flight": 10,
    },
)


def run_of(
    folder: Path, *rows: dict[str, Any], ledger: tuple[dict[str, Any], ...] = (), config: str = ""
) -> RunData:
    """Write the rows, and read the run back."""
    folder.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", rows), ("ledger.jsonl", ledger)):
        if lines:
            (folder / name).write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    return load_run(folder)
