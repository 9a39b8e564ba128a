"""Weights & Biases, as a guest of the run: it may fail, the run may not.

- Axes are explicit: each kind of row is drawn over a key of its own (the catalogue's `AXES`), which is in
  every payload of the kind. No step is ever passed to `log`, so W&B has no step to fall behind: an
  evaluation of version 5 that arrives while step 7 is logged is kept, and drawn at 5.
- Whatever goes wrong here (not installed, no network, a broken call) is one warning, after which
  the sink is silent.
- With mode `disabled` there is no sink.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from staleflow.telemetry.catalogue import AXES, CATALOGUE
from staleflow.telemetry.rows import Row

WandbMode = Literal["online", "offline", "disabled"]

METRICS: Mapping[str, str] = {
    f"{metric.section}/*": AXES[kind]
    for metric in CATALOGUE.values()
    if metric.name not in AXES.values()
    for kind in metric.kinds
    if kind in AXES
}
"""The axis of each section of metrics. An axis itself, such as `run/seconds`, is drawn over nothing."""

START_LIMIT_S = 60.0
"""How long the online service may take to answer before the run goes on without it."""


def open_wandb(
    *,
    mode: WandbMode,
    project: str,
    entity: str | None,
    run_name: str,
    folder: Path,
    config: Mapping[str, Any],
    resume_id: str | None = None,
    warn: Callable[[str], None],
) -> WandbSink | None:
    """Start a W&B run, or return None: quietly when `mode` is `disabled`, after a warning when it fails."""
    if mode == "disabled":
        return None
    try:
        return WandbSink(
            mode=mode,
            project=project,
            entity=entity,
            run_name=run_name,
            folder=folder,
            config=config,
            resume_id=resume_id,
            warn=warn,
        )
    except Exception as error:  # any failure of a guest is a warning
        warn(f"Weights & Biases did not start ({_one_line(error)}); the run goes on without it")
        return None


class WandbSink:
    """Sends train, eval and instances rows to one W&B run; the summary row becomes the run's summary.

    The constructor raises whatever W&B raises; `open_wandb` turns that into a warning.
    """

    def __init__(
        self,
        *,
        mode: WandbMode,
        project: str,
        entity: str | None,
        run_name: str,
        folder: Path,
        config: Mapping[str, Any],
        resume_id: str | None = None,
        warn: Callable[[str], None],
    ) -> None:
        # By name and here only: the import costs most of a second, and other sinks do not need it.
        wandb = importlib.import_module("wandb")
        self._wandb = wandb
        self._warn = warn
        self._run: Any = wandb.init(
            mode=mode,
            project=project,
            entity=entity,
            name=run_name,
            dir=str(folder),
            config=dict(config),
            id=resume_id,
            resume=None if resume_id is None else "allow",
            # `console="off"`: it would take over stdout, which belongs to the live console.
            settings=wandb.Settings(silent=True, quiet=True, console="off", init_timeout=START_LIMIT_S),
        )
        self.run_id: str = self._run.id
        for axis in AXES.values():
            self._run.define_metric(axis)
        for pattern, axis in METRICS.items():
            self._run.define_metric(pattern, step_metric=axis)

    def write(self, row: Row) -> None:
        """Log one row over the axis of its kind; raises ValueError for a row that lacks it (our bug)."""
        axis = AXES.get(row.kind)
        if axis is not None and axis not in row.values:
            raise ValueError(f"a row of kind {row.kind!r} must carry {axis!r}")
        if axis is not None:
            self._guarded(lambda run: run.log(_loggable(row.values)))
        elif row.kind == "summary":
            self._guarded(lambda run: run.summary.update(dict(row.values)))

    def close(self) -> None:
        """Upload or write what is left and end W&B's own process; may be called twice."""
        if self._run is not None:
            self._guarded(lambda run: run.finish())
            self._guarded(lambda _: self._wandb.teardown())
        self._run = None

    def _guarded(self, call: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # any failure of a guest is a warning
            self._run = None
            self._warn(f"Weights & Biases failed ({_one_line(error)}); the run goes on without it")


def _loggable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a curve cannot show: NaN and infinity."""
    return {k: v for k, v in values.items() if not (isinstance(v, float) and not math.isfinite(v))}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
