"""The checks of `gpu_check.sh`: each in a process of its own, with a time limit, and a table at the end.

Invariants: no network and no download, the model is random and made here; a check that crashes, hangs or
lacks a package costs the others nothing; all together end within TOTAL_S; a check passes only by figures that
it has measured, which the table shows. What is checked is in `gpu_check_parts.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_check_parts as parts

TOTAL_S = 460.0
"""Everything, so that a caller's limit of eight minutes holds."""
BASE = ("torch", "transformers", "pydantic", "yaml", "safetensors")
"""Packages that every check needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table."""

    what: str
    run: Callable[[Path, str], parts.Figures]
    """Given the model's folder and the device, returns figures, or raises."""
    needs: tuple[str, ...] = ()
    """Packages beside BASE."""
    limit_s: float


CHECKS = {
    "model": Check(what="a small random model", run=parts.make_model, limit_s=90),
    "torch": Check(what="torch engine", run=parts.torch_engine, limit_s=60),
    "vllm": Check(what="vLLM engine", run=parts.vllm_engine, needs=("vllm",), limit_s=150),
    "deepspeed": Check(
        what="DeepSpeed trainer", run=parts.deepspeed_trainer, needs=("deepspeed",), limit_s=120
    ),
    "transfer": Check(what="weight transfer", run=parts.weight_transfer, limit_s=60),
    "run": Check(what="a short run", run=parts.short_run, needs=("vllm", "deepspeed", "ray"), limit_s=240),
}


def run_all(names: list[str], device: str) -> int:
    """Run checks one after the other and print the table. Returns the exit code."""
    began = time.monotonic()
    rows: list[tuple[str, str, float, str]] = []
    with tempfile.TemporaryDirectory(prefix="staleflow-gpu-check-") as scratch:
        for name in names:
            check, since = CHECKS[name], time.monotonic()
            missing = [p for p in (*BASE, *check.needs) if importlib.util.find_spec(p) is None]
            left = TOTAL_S - (since - began)
            if missing:
                verdict, said = "MISSING", f"not installed: {', '.join(missing)}"
            elif rows and rows[0][1] != "PASS":
                verdict, said = "MISSING", "there is no model to check with"
            elif left < 5:
                verdict, said = "MISSING", "no time left"
            else:
                verdict, said = _run_one(name, device, Path(scratch), min(check.limit_s, left))
            rows.append((check.what, verdict, time.monotonic() - since, said))
            print(f"{verdict:8}{check.what}: {said}", file=sys.stderr)
    width = max(len(what) for what, *_ in rows)
    print(f"\nstaleflow on {device}, {time.monotonic() - began:.0f} s")
    for what, verdict, seconds, said in rows:
        print(f"{what:{width}}  {verdict:7} {seconds:5.0f} s  {said}")
    return 0 if all(verdict == "PASS" for _, verdict, _, _ in rows) else 1


def _run_one(name: str, device: str, scratch: Path, limit_s: float) -> tuple[str, str]:
    answer, log = scratch / f"{name}.json", scratch / f"{name}.log"
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--folder",
        str(scratch / "model"),
        "--answer",
        str(answer),
    ]
    environment = dict(os.environ)
    if device == "cpu":
        command.append("--cpu")
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            said = f"no end within {limit_s:.0f} s"
        else:
            said = f"its process ended with {process.returncode}"
        finally:  # whatever it has started goes with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if answer.is_file():
        result = json.loads(answer.read_text())
        if "error" not in result:
            return "PASS", ", ".join(f"{key} {value}" for key, value in result.items())
        said = result["error"]
    tail = log.read_text(errors="replace").strip().splitlines()[-15:]
    print("\n".join(["", f"--- {name}: the end of what it said", *tail, "---"]), file=sys.stderr)
    return "FAIL", said


def _one(name: str, device: str, folder: Path, answer: Path) -> int:
    try:
        result: dict[str, Any] = dict(CHECKS[name].run(folder, device))
    except Exception as error:
        text = str(error).strip().splitlines()
        result = {"error": f"{type(error).__name__}: {text[0] if text else 'no message'}"}
        answer.write_text(json.dumps(result))
        raise
    answer.write_text(json.dumps(result))
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="without a GPU")
    parser.add_argument("--only", metavar="a,b", help=f"some of {', '.join(CHECKS)}; model always runs")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    if arguments.one:
        return _one(arguments.one, device, arguments.folder, arguments.answer)
    names = arguments.only.split(",") if arguments.only else list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        parser.error(f"--only: there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return run_all(list(dict.fromkeys(["model", *names])), device)


if __name__ == "__main__":
    sys.exit(main())
