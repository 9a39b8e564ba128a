"""How much of a real run's time goes into coordination, and how long decoding stood still for it.

Both are shares of the time in which all parts were up: starting processes and the last checkpoint are left
out, which makes the shares larger, not smaller.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from staleflow.errors import RunFailed, UserError
from staleflow.reporting.load import RunData, load_run

KINDS = ("route", "interrupt", "abort", "pull")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShare:
    """Shares of 1."""

    wall_s: float
    steps: int
    instances: float
    """On average."""
    step: float
    """`Control.cycle`: CPU seconds, of wall time."""
    handle: float
    """`Control.handle`: likewise."""
    still: dict[str, float]
    """By kind of command: time that decoding stood still, of the instances' time."""


def share_of_run(folder: Path | None, *, steps: int) -> RunShare:
    """Of a finished run, or of a short one with the default config. Raises UserError, RunFailed."""
    if folder is not None:
        return _share(load_run(folder))
    with tempfile.TemporaryDirectory(prefix="staleflow-") as output:
        command = [
            sys.executable,
            "-P",
            "-m",
            "staleflow.cli",
            "run",
            f"run.output_dir={output}",
            "run.name=short",
        ]
        command += [f"run.steps={steps}", "evaluation.every=0", "telemetry.console=off"]
        command += ["cluster.start_timeout_s=600"]  # the machine may be busy
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailed(f"a short run ended with exit code {done.returncode}: {done.stderr.strip()}")
        return _share(load_run(Path(output) / "short"))


def _share(run: RunData) -> RunShare:
    summary = run.summary
    if "coord/step_seconds" not in summary:
        raise UserError(f"{run.folder} has no summary of its coordination: give a run that ended by itself")
    wall_s = sum(row.get("time/step_s", 0.0) for row in run.train)
    instances_s = sum(row.get("time/instances_s", 0.0) for row in run.train)
    if not wall_s or not instances_s:
        raise UserError(f"{run.folder} has no training step to look at")
    return RunShare(
        wall_s=wall_s,
        steps=len(run.train),
        instances=instances_s / wall_s,
        step=summary["coord/step_seconds"] / wall_s,
        handle=summary["coord/handle_seconds"] / wall_s,
        still={kind: summary[f"coord/{kind}_seconds"] / instances_s for kind in KINDS},
    )
