"""A grid study: systems on simulated machines over a grid of settings, tuned, measured, and told as a page.

A study declares its parts (settings, systems, how much is simulated) and what its page says of the measured
cells. Everything else is here, once: points are kept so that an interrupted study goes on, every cell is
tuned by the same search, and each page shows all of its cells and says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from staleflow.experiments.cell_tables import Panel, cell_table, panels_figure
from staleflow.experiments.cells import (
    Cell,
    CellOutcome,
    Effort,
    System,
    cell,
    measure_cells,
    measure_chosen,
    tune,
)
from staleflow.experiments.points import PointFile, ratio_text, speedup
from staleflow.experiments.study import Finding, Options, Result, Study, Table
from staleflow.experiments.workload import HARDWARE_NOTE, LENGTH_NOTE, STALEFLOW
from staleflow.reporting.spread import Spread
from staleflow.storage.provenance import provenance

Row = tuple[str | float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine and a workload under one η."""

    name: str
    """Of machine and workload."""
    values: tuple[str | int, ...]
    """What stands in the first columns of a table; the last may be η."""
    overrides: tuple[str, ...]
    gpus: int
    bound: int

    def cell(self, system: System) -> Cell:
        """A system in this setting."""
        return cell(self.name, self.overrides, self.gpus, self.bound, system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Every system in every setting."""

    settings: tuple[Setting, ...]
    systems: tuple[System, ...]
    effort: Effort
    tuned_as: System | None = None
    """All systems run on the layouts that are best for this one. None: each is tuned by itself."""

    def measure(self, file: PointFile) -> dict[Cell, CellOutcome]:
        """Tune and measure all cells."""
        if self.tuned_as is None:
            cells = [setting.cell(system) for setting in self.settings for system in self.systems]
            return measure_cells(cells, self.effort, file)
        tuned = tune([setting.cell(self.tuned_as) for setting in self.settings], self.effort, file)
        choices = {
            setting.cell(system): tuned[setting.cell(self.tuned_as)]
            for setting in self.settings
            for system in self.systems
        }
        return measure_chosen(choices, self.effort, file)


class Measurements:
    """Measured cells, by setting and system."""

    def __init__(self, outcomes: Mapping[Cell, CellOutcome]) -> None:
        self._outcomes = outcomes

    def outcome(self, setting: Setting, system: System) -> CellOutcome:
        """A measured cell."""
        return self._outcomes[setting.cell(system)]

    def rate(self, setting: Setting, system: System) -> Spread:
        """Trained tokens a second."""
        return Spread.of([run.tokens_per_s for run in self.outcome(setting, system).runs])

    def gain(self, setting: Setting, over: System) -> Spread:
        """Speed-up of staleflow, seed by seed."""
        return speedup(self.outcome(setting, STALEFLOW).runs, self.outcome(setting, over).runs)

    def gain_text(self, setting: Setting, over: System) -> str:
        """The same as text."""
        return ratio_text(self.gain(setting, over))

    def room(self, setting: Setting, over: System) -> float:
        """What no policy on divided GPUs exceeds, over a system: best bound of any layout / its rate."""
        return self.outcome(setting, STALEFLOW).choice.most / self.rate(setting, over).median

    def of_bound(self, setting: Setting) -> float:
        """Share of the least bound of its layout that staleflow reaches."""
        runs = self.outcome(setting, STALEFLOW).runs
        return Spread.of([run.tokens_per_s / run.least for run in runs]).median

    def panel(
        self,
        title: str,
        marks: Sequence[str],
        settings: Sequence[Setting],
        part: Part,
        *,
        bounds: bool = True,
    ) -> Panel:
        """A diagram: a line for each system over settings; `bounds`: with what no layout exceeds."""
        thousand = 1000
        return Panel(
            title=title,
            marks=tuple(marks),
            lines={
                system.name: [
                    Spread.of([run.tokens_per_s / thousand for run in self.outcome(setting, system).runs])
                    for setting in settings
                ]
                for system in part.systems
            },
            bound=[self.outcome(s, STALEFLOW).choice.most / thousand for s in settings] if bounds else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a study says of its measured cells; each function gets the parts and the measurements."""

    along: tuple[str, ...]
    """Names of `Setting.values`."""
    findings: Callable[[Sequence[Part], Measurements], list[Finding]]
    tables: Callable[[Sequence[Part], Measurements], list[Table]]
    panels: Callable[[Sequence[Part], Measurements], list[Panel]]
    panel_columns: Callable[[Sequence[Part]], int]
    panels_along: str
    notes: Callable[[Sequence[Part], Measurements], list[str]]
    quick_note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStudy:
    """A declared grid study; its first part is the one that is listed and drawn."""

    name: str
    question: str
    full: tuple[Part, ...]
    quick: tuple[Part, ...]
    page: Page

    def study(self) -> Study:
        """As `staleflow experiment` knows it."""
        return Study(name=self.name, question=self.question, script=self.measure)

    def measure(self, options: Options) -> Result:
        """Tune and measure all parts, those points that are not kept from before."""
        parts = self.quick if options.quick else self.full
        folder = options.folder or Path(f"runs/experiment-{self.name}")
        file = PointFile(folder / f"{self.name}.points.jsonl")
        outcomes: dict[Cell, CellOutcome] = {}
        for part in parts:
            seeds = part.effort.seeds
            options.say(f"{len(part.settings)} settings, {len(part.systems)} systems, {seeds} seeds")
            outcomes |= part.measure(file)
        return self.result(parts, Measurements(outcomes), quick=options.quick)

    def result(self, parts: Sequence[Part], at: Measurements, *, quick: bool) -> Result:
        """The page of measured cells. Quick ones judge nothing by goals."""
        page, effort = self.page, parts[0].effort
        findings = page.findings(parts, at)
        return Result(
            findings=tuple(without_goals(findings) if quick else findings),
            tables=(*page.tables(parts, at), self._all_cells(parts[0], at)),
            figures={
                f"{self.name}.svg": panels_figure(
                    self.name,
                    page.panels(parts, at),
                    columns=page.panel_columns(parts),
                    along=page.panels_along,
                    label="1,000 trained tokens/s",
                )
            },
            notes=(
                f"Made by `staleflow experiment {self.name}{' --quick' if quick else ''}` at commit "
                f"{provenance()['git']}.",
                *page.notes(parts, at),
                LENGTH_NOTE,
                HARDWARE_NOTE,
                f"{effort.seeds} seeds; {effort.measured} steps or more count after the first η + 2, in "
                "whole rounds of η + 1: from empty buffers batches come in bursts of so many.",
                *((page.quick_note,) if quick else ()),
            ),
        )

    def _all_cells(self, part: Part, at: Measurements) -> Table:
        """Each cell once: one that stands for several η is at the first of them."""
        once: dict[Cell, tuple[Setting, System]] = {}
        for setting in part.settings:
            for system in part.systems:
                once.setdefault(setting.cell(system), (setting, system))
        rows = [
            (kept_values(setting, system, self.page.along), system.name, at.outcome(setting, system))
            for setting, system in once.values()
        ]
        return cell_table("All cells", self.page.along, rows)


def kept_values(setting: Setting, system: System, along: Sequence[str]) -> Row:
    """The setting's values, with the η that the system keeps."""
    if along[-1] != "η":
        return setting.values
    return (*setting.values[:-1], system.kept(setting.bound))


def without_goals(findings: Sequence[Finding]) -> list[Finding]:
    """The same figures, shown for what they are."""
    return [Finding(name=f.name, value=f.value, unit=f.unit, wanted=f.wanted, note=f.note) for f in findings]
