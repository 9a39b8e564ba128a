"""The simulated studies: their grids, the search for layouts, and what their pages say of made-up cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.experiments import ablation, cells, scaling, throughput
from staleflow.experiments.cells import (
    Cell,
    CellOutcome,
    Choice,
    Effort,
    System,
    best_of,
    candidates,
    cell,
    tune,
)
from staleflow.experiments.grid import Measurements, Part
from staleflow.experiments.page import to_json, to_markdown
from staleflow.experiments.points import Point, PointFile, PointResult
from staleflow.experiments.study import STUDIES, Result, load_study
from staleflow.experiments.throughput import BASELINES, agreement, setting
from staleflow.experiments.workload import (
    DIVIDED,
    ONE_STEP,
    QUEUE,
    STALEFLOW,
    STRICT,
    SYNC,
    SYSTEMS,
    machine,
    workload,
)

SPEED = {"sync": 100.0, "sync, divided": 80.0, "one_step": 150.0, "strict": 160.0, "strict_queue": 190.0}
"""Made-up tokens per second; staleflow's are 200."""


def made_up(rate: float) -> PointResult:
    return PointResult(
        tokens_per_s=rate,
        step_s=1000.0 / rate,
        update_s=2.0,
        trainer_idle=0.25,
        instances_idle=0.1,
        pulling=0.02,
        staleness_mean=0.5,
        staleness_max=1,
        running_mean=8.0,
        preemptions=3,
        interrupts=2,
        rollout=300.0,
        trainer=250.0,
        latency=400.0,
        cpu_s=1.0,
    )


def outcome(of: Cell, rate: float, seeds: int = 3) -> CellOutcome:
    choice = Choice(candidate=candidates(of)[0], cap=30 if of.system == QUEUE else None, tried=4, most=240.0)
    return CellOutcome(choice=choice, runs=tuple(made_up(rate * (1 + 0.01 * seed)) for seed in range(seeds)))


def outcomes(wanted: Iterable[Cell]) -> dict[Cell, CellOutcome]:
    return {c: outcome(c, SPEED.get(c.system.name, 200.0)) for c in wanted}


# ---------------------------------------------------------------------- grids


def test_the_full_grid_is_the_papers() -> None:
    part = throughput.FULL[0]
    assert [where.values for where in part.settings] == [
        (model, gpus, bound)
        for model in ("qwen2.5-14b", "qwen2.5-32b", "qwen3-30b-a3b")
        for gpus in (64, 128)
        for bound in (1, 2, 3)
    ]
    assert part.effort.seeds >= 3
    assert {s.policy for s in SYSTEMS} == {"sync", "one_step", "strict", "strict_queue", "staleflow"}
    assert "data.batch_size=128" in workload()
    assert "data.group_size=16" in workload()


def test_a_policy_that_keeps_a_smaller_bound_is_one_cell_for_all() -> None:
    def distinct(system: System) -> int:
        return len({where.cell(system) for where in throughput.FULL[0].settings})

    assert distinct(SYNC) == distinct(DIVIDED) == distinct(ONE_STEP) == 3 * 2
    assert distinct(STRICT) == distinct(STALEFLOW) == 3 * 2 * 3
    assert setting("qwen2.5-14b", 64, 3).cell(DIVIDED).bound == 0
    assert setting("qwen2.5-14b", 64, 3).cell(ONE_STEP).bound == 1


@pytest.mark.parametrize("place", [("qwen2.5-32b", 64, 1), ("qwen3-30b-a3b", 128, 3)])
def test_every_system_has_layouts_for_all_gpus(place: tuple[str, int, int]) -> None:
    for system in SYSTEMS:
        for candidate in candidates(setting(*place).cell(system))[:3]:
            layout = candidate.layout
            assert layout.rollout_gpus + layout.training_gpus == place[1]


def test_sync_generates_with_all_gpus() -> None:
    found = candidates(setting("qwen2.5-14b", 64, 1).cell(SYNC))
    assert {c.instances * c.layout.tensor_parallel for c in found} == {64}


# ---------------------------------------------------------------------- the search


def test_the_fastest_wins_and_of_equals_the_more_promising() -> None:
    assert best_of({(0, None): 5.0, (3, None): 7.0, (1, None): 7.0}) == (1, None)


def test_the_search_climbs_to_the_neighbours_and_tunes_the_cap_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up simulations like more GPUs to generate with, and caps of half the load that fits."""
    seen: list[str] = []

    def made(points: Iterable[Point], file: PointFile, *, title: str) -> dict[Point, PointResult]:
        found = {}
        for point in points:
            values = dict(o.split("=") for o in point.overrides)
            cap = float(values.get("coordination.routing.max_per_instance", 0))
            found[point] = made_up(1000 * float(values["simulation.rollout_gpus"]) - cap)
            seen.append(values["run.seed"])
        return found

    monkeypatch.setattr(cells, "measure", made)
    overrides = (*workload(), *machine("qwen2.5-14b"))
    wanted = [cell("x", overrides, 64, 1, system) for system in (QUEUE, STALEFLOW)]
    effort = Effort(seeds=3, measured=2, layouts=1, rounds=2)
    found = tune(wanted, effort, PointFile(tmp_path / "points.jsonl"))
    first = candidates(wanted[0])[0].layout
    for of in wanted:
        assert found[of].candidate.layout.rollout_gpus == first.rollout_gpus + 2 * 4  # two rounds of 4 GPUs
    assert found[wanted[0]].cap == cells.scaled_cap(found[wanted[0]].candidate, 0.5)
    assert found[wanted[1]].cap is None
    assert str(throughput.FULL[0].effort.seeds) not in seen
    assert set(seen) == {str(cells.TUNING_SEED)}


def test_all_systems_but_the_capped_one_are_tuned_with_as_many_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "measure", lambda points, file, title: {p: made_up(1.0) for p in list(points)})
    wanted = [
        setting("qwen2.5-14b", 64, 1).cell(system) for system in (DIVIDED, ONE_STEP, STRICT, STALEFLOW, QUEUE)
    ]
    found = tune(wanted, Effort(seeds=3, measured=2, layouts=3, rounds=0), PointFile(tmp_path / "p"))
    assert [found[c].tried for c in wanted] == [3, 3, 3, 3, 3 + len(cells.CAPS)]


# ---------------------------------------------------------------------- pages of made-up cells


def measured(parts: Sequence[Part]) -> Measurements:
    cells = {where.cell(system) for part in parts for where in part.settings for system in part.systems}
    return Measurements(outcomes(cells))


def throughput_page(quick: bool) -> tuple[str, Result]:
    main, varied = throughput.QUICK
    settings = tuple(where for where in main.settings if where.values[0] == "qwen2.5-14b")
    parts = (replace(main, settings=settings), varied)
    result = throughput.GRID.result(parts, measured(parts), quick=quick)
    return to_markdown(throughput.THROUGHPUT, result), result


def test_the_throughput_page_puts_the_papers_figures_beside_ours() -> None:
    page, result = throughput_page(quick=False)
    assert "| sync | 1.91x mean, 2.68x best | 2.00x mean, 2.00x best | 2.00x | the mean does" in page
    assert "| strict | 1.18x mean, 1.42x best | 1.25x mean, 1.25x best |" in page
    assert "the paper (arXiv 2601.12784)" in page
    judged = {f.name: f.reached for f in result.findings if f.goal is not None}
    assert judged == {
        "staleflow over sync, mean of 2 settings": True,
        "staleflow over sync, best of 2 settings": False,
        "staleflow over strict, mean of 2 settings": True,
        "staleflow over strict, best of 2 settings": False,
    }


def test_the_throughput_page_says_how_it_was_made_and_what_is_possible() -> None:
    page, result = throughput_page(quick=True)
    assert "`staleflow experiment throughput --quick` at commit" in page
    assert not [f for f in result.findings if f.goal is not None]
    room = next(f for f in result.findings if f.name.startswith("no policy exceeds, over sync"))
    assert room.value == pytest.approx(240.0 / 101.0)
    assert "![throughput.svg](throughput.svg)" in page
    assert "<svg" in result.figures["throughput.svg"]
    assert '"missed"' not in to_json(throughput.THROUGHPUT, result)


def test_a_cell_that_stands_for_every_bound_is_in_the_table_once() -> None:
    _, result = throughput_page(quick=True)
    table = next(t for t in result.tables if t.title == "All cells")
    assert [row[3] for row in table.rows].count("sync") == 1
    assert [row[3] for row in table.rows].count("staleflow") == 2


def test_the_gain_is_seed_by_seed() -> None:
    place = ("qwen2.5-14b", 128, 1)
    found = {s: outcome(setting(*place).cell(s), r) for s, r in ((STALEFLOW, 180.0), (SYNC, 90.0))}
    at = Measurements({setting(*place).cell(s): o for s, o in found.items()})
    assert at.gain_text(setting(*place), SYNC) == "2.00 (2.00 to 2.00)"


@pytest.mark.parametrize(
    ("mean", "best", "words"),
    [
        (1.95, 2.5, "agrees"),
        (1.8, 2.0, "the mean does, the best does not"),
        (1.5, 2.7, "the best does, the mean does not"),
        (1.2, 1.3, "less than the paper"),
    ],
)
def test_agreement_allows_a_tenth(mean: float, best: float, words: str) -> None:
    paper = BASELINES[0].paper
    assert paper is not None
    assert agreement(mean, best, paper) == words


def test_the_scaling_page_has_every_axis() -> None:
    parts = (scaling.QUICK,)
    result = scaling.GRID.result(parts, measured(parts), quick=True)
    page = to_markdown(scaling.SCALING, result)
    for axis in scaling.AXES:
        assert f"By {axis.name}" in page
    assert "| GPUs: staleflow over strict at 128 | 1.25 x |" in page
    assert all(axis.sizes[0] != axis.sizes[-1] for axis in scaling.QUICK_AXES)
    assert set(scaling.QUICK.settings) < set(scaling.FULL.settings)


def test_the_ablation_page_tells_what_pays_from_what_does_not() -> None:
    part = ablation.part((128,), (1,), ablation.QUICK.effort)
    rates: Sequence[tuple[System, float]] = list(
        zip(ablation.VARIANTS, (200.0, 160.0, 200.0, 250.0, 150.0), strict=True)
    )
    (where,) = part.settings
    at = Measurements({where.cell(v): outcome(where.cell(v), rate) for v, rate in rates})
    table = ablation.GRID.result((part,), at, quick=True).tables[0]
    assert [(row[2], row[5]) for row in table.rows] == [
        ("staleflow", ""),
        ("naive routing", "pays"),
        ("naive synchronization", "no difference"),
        ("naive migration", "costs"),
        ("all naive", "pays"),
    ]


def test_all_variants_of_the_ablation_run_on_the_layout_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "measure", lambda points, file, title: {p: made_up(1.0) for p in list(points)})
    part = ablation.part((64,), (1,), Effort(seeds=2, measured=2, layouts=2, rounds=0))
    found = part.measure(PointFile(tmp_path / "points.jsonl"))
    assert {c.system.name for c in found} == {v.name for v in ablation.VARIANTS}
    assert len({o.choice.layout_text for o in found.values()}) == 1
    assert {o.choice.tried for o in found.values()} == {2}, "only the whole was tuned"


@pytest.mark.parametrize("name", ["throughput", "scaling", "ablation"])
def test_the_studies_have_names(name: str) -> None:
    assert name in STUDIES
    assert load_study(name).name == name
