"""What a declared study is, and what it comes back with.

Invariant: a finding with a goal says by itself whether it was reached; one that missed it is shown like any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from staleflow.errors import ConfigError, UserError
from staleflow.registry import load_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure that was measured."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    """None: shown for what it is."""
    wanted: Literal["at most", "at least"] = "at most"
    note: str = ""
    """How it was measured, when that needs saying."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal was reached; None without one."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.wanted == "at most" else self.value >= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures that are read together."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a study found."""

    findings: tuple[Finding, ...]
    tables: tuple[Table, ...] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    """SVG text by file name."""
    notes: tuple[str, ...] = ()
    """What a reader must know to take the figures for what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a study is run this time."""

    quick: bool
    """Small sizes: shows that everything works; goals that need the full size are not judged."""
    run: Path | None
    """A finished run to look at, where the study needs one. None: it makes one."""
    say: Callable[[str], None]
    """Tell a waiting person what is being done."""
    folder: Path | None = None
    """Where its page will be; a study that takes long keeps there what it has finished."""

    def __post_init__(self) -> None:
        """Raises UserError for a folder that there cannot be, before anything is measured."""
        if self.folder is not None:
            there = next((p for p in (self.folder, *self.folder.parents) if p.exists()), self.folder)
            if there.exists() and not there.is_dir():
                raise UserError(
                    f"{there} is a file, and the study's page needs a folder: choose another --output"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A question to the system, and the script that answers it."""

    name: str
    question: str
    script: Callable[[Options], Result]


STUDIES: dict[str, str] = {
    "overhead": "staleflow.experiments.overhead.OVERHEAD",
    "fidelity": "staleflow.experiments.fidelity.FIDELITY",
    "throughput": "staleflow.experiments.throughput.THROUGHPUT",
    "scaling": "staleflow.experiments.scaling.SCALING",
    "ablation": "staleflow.experiments.ablation.ABLATION",
    "convergence": "staleflow.experiments.convergence.CONVERGENCE",
    "engines": "staleflow.experiments.engines.ENGINES",
    "whole-step": "staleflow.experiments.whole_step.WHOLE_STEP",
    "simulator": "staleflow.experiments.simulator.SIMULATOR",
    "protocol": "staleflow.experiments.protocol_rate.PROTOCOL",
    "weights": "staleflow.experiments.transfer.WEIGHTS",
}
"""`staleflow experiment NAME`; a dotted path to a `Study` works too."""


def load_study(name: str) -> Study:
    """The study of this name. Raises ConfigError."""
    study = load_named("study", name, STUDIES)
    if not isinstance(study, Study):
        raise ConfigError(f"{name} is not a study: name a staleflow.experiments.study.Study")
    return study
